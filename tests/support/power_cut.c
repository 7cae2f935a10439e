/* Copies a file below $POWER_CUT_FILES to the same place below $POWER_CUT_SYNCED whenever it has been synced, with what it had when the sync
 * began: all that a power cut is sure to leave. A file that was removed is there until its directory is synced. Adds a byte to
 * $POWER_CUT_SYNCED.count for each sync of a file. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Removes the files from a copied directory that the directory no longer has. */
static void remove_lost(const char *directory, const char *copy) {
    DIR *entries = opendir(copy);
    if (!entries) abort();
    char path[3 * PATH_MAX];
    for (struct dirent *entry; (entry = readdir(entries));) {
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (access(path, F_OK) == 0) continue;
        snprintf(path, sizeof path, "%s/%s", copy, entry->d_name);
        unlink(path);
    }
    closedir(entries);
}

static int sync_and_copy(int fd, const char *name) {
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const char *files = getenv("POWER_CUT_FILES"), *synced = getenv("POWER_CUT_SYNCED");
    char link[64], path[PATH_MAX], copy[2 * PATH_MAX], next[2 * PATH_MAX + 64], count[2 * PATH_MAX], bytes[65536];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (!files || !synced || length < 0 || fstat(fd, &status) || status.st_nlink == 0) return sync(fd);
    path[length] = 0;
    const char *below = path + strlen(files);
    if (strncmp(path, files, strlen(files)) || (*below && *below != '/')) return sync(fd);
    snprintf(copy, sizeof copy, "%s%s", synced, below);
    if (S_ISDIR(status.st_mode)) {
        mkdir(copy, 0700);
        remove_lost(path, copy);
        return sync(fd);
    }
    snprintf(next, sizeof next, "%s.next-%d", synced, gettid());
    int to = open(next, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    /* Not through a second descriptor, whose end would take SQLite's locks along. */
    for (off_t at = 0; (length = pread(fd, bytes, sizeof bytes, at)) > 0; at += length)
        if (write(to, bytes, length) != length) abort();
    if (length < 0 || close(to)) abort();
    int result = sync(fd);
    if (result) return result;
    snprintf(count, sizeof count, "%s.count", synced);
    to = open(count, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (rename(next, copy) || write(to, ".", 1) != 1 || close(to)) abort();
    return result;
}

int fsync(int fd) { return sync_and_copy(fd, "fsync"); }

int fdatasync(int fd) { return sync_and_copy(fd, "fdatasync"); }

//! An append-only file of lines that is never left half written.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions, TryLockError, rename},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// An append-only file of lines, locked by one process. [`Journal`](super::Journal) uses it; use it for logs of your own.
///
/// After a crash there are only complete lines, since an incomplete last line is removed when the file is opened. The file is readable
/// by its owner only (on Unix). All methods block on the disk.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("log");
/// use tower_x402::client::JournalFile;
///
/// let (mut file, lines) = JournalFile::open(&path)?;
/// assert_eq!(lines, "");
/// file.append(b"first\n", true)?;
/// assert!(JournalFile::open(&path).is_err(), "it is locked");
/// drop(file);
/// assert_eq!(JournalFile::open(&path)?.1, "first\n");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    file: File,
    /// The length of its complete lines, in bytes.
    length: u64,
}

impl JournalFile {
    /// Opens or creates the file, locks it, and returns its lines.
    ///
    /// # Errors
    /// The file cannot be opened or read, is not a regular file or not UTF-8, or is open already, here or in another process.
    pub fn open(path: &Path) -> io::Result<(Self, String)> {
        // The working directory may change.
        let path = std::path::absolute(path)?;
        let mut file = locked(&path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        if complete < text.len() {
            text.truncate(complete);
            file.set_len(complete as u64)?;
        }
        if complete == 0 {
            sync_directory_of(&path)?;
        }
        Ok((Self { path, file, length: complete as u64 }, text))
    }

    /// Replaces the open file, for tests of write errors.
    #[cfg(test)]
    pub(crate) fn swap(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Returns the length of its lines, in bytes.
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Appends complete lines, each of which ends with `\n`. If `durable`, they are on disk when this returns.
    ///
    /// # Errors
    /// The lines could not be written; or `durable` was asked for and the file was removed or replaced. Lines that were written in part
    /// are removed by the next call, or when the file is opened again.
    pub fn append(&mut self, lines: &[u8], durable: bool) -> io::Result<()> {
        // Writing to a removed file succeeds, and the lines are lost.
        if durable && !is_at(&self.file, &self.path)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the file was replaced by another one"));
        }
        // Removes what an earlier failed write may have left; does nothing otherwise.
        self.file.set_len(self.length)?;
        self.file.write_all(lines)?;
        if durable {
            self.file.sync_data()?;
        }
        self.length += lines.len() as u64;
        Ok(())
    }

    /// Replaces all lines by these. After a crash there is the old file or the new one.
    ///
    /// # Errors
    /// The new file could not be written or renamed, and the old one stays in use; or its directory could not be synced.
    pub fn replace(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut name = self.path.file_name().map(OsString::from).unwrap_or_default();
        name.push(".new");
        let aside = self.path.with_file_name(name);
        // Locked before it is renamed, so that no other process can open it in between.
        let mut file = locked(&aside)?;
        file.set_len(0)?;
        file.write_all(lines)?;
        file.sync_all()?;
        rename(&aside, &self.path)?;
        self.file = file;
        self.length = lines.len() as u64;
        sync_directory_of(&self.path)
    }
}

/// Opens and locks a file that only its owner may read.
fn locked(path: &Path) -> io::Result<File> {
    // Reading a device may never end, and its permissions must not change.
    if path.exists() && !path.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    file.try_lock()?;
    // It may have been replaced between the two lines above.
    if !is_at(&file, path)? {
        return Err(TryLockError::WouldBlock.into());
    }
    // The file may have been created with other permissions.
    #[cfg(unix)]
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(file)
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (open, named) = (file.metadata()?, std::fs::metadata(path)?);
    Ok((open.dev(), open.ino()) == (named.dev(), named.ino()))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> io::Result<bool> {
    Ok(path.exists())
}

/// Makes a new name durable: it survives a crash only if its directory was synced too.
fn sync_directory_of(path: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

//! Paths that every server reads in the same way.

use percent_encoding::percent_decode_str;

/// Returns the path without percent-encoding. Returns `None` if two servers could take it for different paths: then a request could be
/// priced for one route and answered by another.
pub(crate) fn plain(path: &str) -> Option<String> {
    let hides_separator = |text: &str| text.contains("%2f") || text.contains("%5c") || text.contains("%00");
    if !path.starts_with('/') || hides_separator(&path.to_ascii_lowercase()) {
        return None;
    }
    let decoded = percent_decode_str(path).decode_utf8().ok()?.into_owned();
    let is_odd = |segment: &str| matches!(segment, "." | "..");
    // Some servers decode a path before they look for its end.
    let is_ambiguous = decoded.contains(['\\', '\0', ';', '?', '#'])
        || decoded.contains("//")
        // Decoded twice, it would be another path.
        || decoded.contains('%')
        || decoded.chars().any(char::is_control)
        || decoded.split('/').any(is_odd);
    (!is_ambiguous).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_letters_are_letters() {
        for (path, expected) in [("/", "/"), ("/%65valuate", "/evaluate"), ("/a%20b/", "/a b/"), ("/%C3%A9", "/é")] {
            assert_eq!(plain(path).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn a_path_that_can_be_read_in_two_ways_is_none() {
        for path in [
            "",
            "evaluate",
            "*",
            "//evaluate",
            "/free/../evaluate",
            "/free/%2e%2e/evaluate",
            "/free%2Fevaluate",
            "/./evaluate",
            "/a\\b",
            "/a%5Cb",
            "/evaluate%00",
            "/%2565valuate",
            "/evaluate;x=1",
            "/evaluate%3Fx",
            "/evaluate%23x",
            "/%ff",
            "/%0a",
            "/a/..",
        ] {
            assert_eq!(plain(path), None, "{path}");
        }
    }
}

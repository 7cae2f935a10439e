//! Times as text (RFC 3339).

use jiff::Timestamp;

/// Formats Unix seconds as text in UTC, such as `2026-11-21T10:15:30Z`. Times after the year 9999 are written as its end.
pub(crate) fn format(seconds: u64) -> String {
    at(seconds).to_string()
}

fn at(seconds: u64) -> Timestamp {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).min(Timestamp::MAX.as_second());
    Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_utc() {
        for (text, seconds) in [
            // By `date -u -d @N +%FT%TZ`.
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2026-11-21T10:15:30Z", 1_795_256_130),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!(format(seconds), text);
        }
        assert_eq!(format(u64::MAX), "9999-12-30T22:00:00Z");
    }
}

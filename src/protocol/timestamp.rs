//! Times as text (RFC 3339).

use jiff::Timestamp;

/// Formats Unix seconds as text in UTC, such as `2026-11-21T10:15:30Z`. Times after the year 9999 are written as its end.
#[cfg(feature = "facilitator")]
pub(crate) fn format(seconds: u64) -> String {
    at(seconds).to_string()
}

/// Parses a text such as `2026-11-21T10:15:30.250+01:00` as Unix seconds, without the fraction. Returns `None` if it is no time, or one
/// before 1970.
#[cfg(all(feature = "bazaar", feature = "reqwest"))]
pub(crate) fn parse(text: &str) -> Option<u64> {
    u64::try_from(text.parse::<Timestamp>().ok()?.as_second()).ok()
}

#[cfg(feature = "facilitator")]
fn at(seconds: u64) -> Timestamp {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).min(Timestamp::MAX.as_second());
    Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(all(test, feature = "bazaar", feature = "facilitator", feature = "reqwest"))]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_it_is_read() {
        for (text, seconds) in [
            // By `date -u -d @N +%FT%TZ`.
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2026-11-21T10:15:30Z", 1_795_256_130),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!((format(seconds).as_str(), parse(text)), (text, Some(seconds)));
        }
        assert_eq!(format(u64::MAX), "9999-12-30T22:00:00Z");
    }

    #[test]
    fn other_forms_are_read_and_texts_without_a_time_are_not() {
        for (text, seconds) in [
            ("1970-01-01T00:00:01Z", Some(1)),
            ("1970-01-01t01:00:00.123456789+01:00", Some(0)),
            ("1969-12-31 23:30:00-00:30", Some(0)),
            ("1970-01-01T00:00:00+00:01", None),
            ("1970-02-30T00:00:00Z", None),
            ("1970-13-01T00:00:00Z", None),
            ("1970-00-01T00:00:00Z", None),
            ("1970-01-01T24:00:00Z", None),
            ("1970-01-01T00:00:00", None),
            ("1970-01-01", None),
            ("yesterday", None),
            ("", None),
            ("\u{e9}970-01-01T00:00:00Z", None),
        ] {
            assert_eq!(parse(text), seconds, "{text}");
        }
    }
}

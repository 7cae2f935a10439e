//! Moments as text (RFC 3339).

const DAY: i64 = 86_400;

/// Unix seconds as text, in UTC; no later than the year 9999.
#[cfg(any(feature = "facilitator", test))]
pub(crate) fn format(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).min(253_402_300_799);
    let (days, time) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3_600, time / 60 % 60, time % 60)
}

/// The same as JavaScript writes it, to the millisecond.
#[cfg(any(feature = "server", test))]
pub(crate) fn format_millis(seconds: u64) -> String {
    format(seconds).replace('Z', ".000Z")
}

/// Unix seconds of a text such as `2026-11-21T10:15:30.250+01:00`; fractions are cut off. `None` if it is none, or before 1970.
#[cfg(any(feature = "reqwest", test))]
pub(crate) fn parse(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse().ok()
    };
    let separators = [(4, "-"), (7, "-"), (13, ":"), (16, ":")];
    if !separators.iter().all(|(at, is)| text.get(*at..at + 1) == Some(is))
        || !matches!(text.get(10..11)?, "T" | "t" | " ")
    {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let days = days(year, month, day);
    // A day that there is.
    if civil(days) != (year, month, day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let mut rest = text.get(19..)?;
    if let Some(fraction) = rest.strip_prefix('.') {
        rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    let offset = match rest.as_bytes() {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), h, m, b':', x, y] if [h, m, x, y].iter().all(|digit| digit.is_ascii_digit()) => {
            let digit = |byte: &u8| i64::from(byte - b'0');
            let ahead = (digit(h) * 10 + digit(m)) * 3_600 + (digit(x) * 10 + digit(y)) * 60;
            if *sign == b'+' { ahead } else { -ahead }
        }
        _ => return None,
    };
    u64::try_from(days * DAY + hour * 3_600 + minute * 60 + second - offset).ok()
}

/// The date of a day counted from 1970, in the Gregorian calendar: years are counted from March, so that the leap day is their last.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(any(feature = "reqwest", test))]
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * shifted + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_written_as_it_is_read() {
        for (text, seconds) in [
            // By `date -u -d @N +%FT%TZ`.
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-28T23:59:59Z", 951_782_399),
            ("2000-02-29T00:00:00Z", 951_782_400),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2024-12-31T23:59:59Z", 1_735_689_599),
            ("2026-11-21T10:15:30Z", 1_795_256_130),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!((format(seconds).as_str(), parse(text)), (text, Some(seconds)));
        }
        for seconds in (0..4_102_444_800).step_by(12_345_677) {
            assert_eq!(parse(&format(seconds)), Some(seconds));
            assert_eq!(parse(&format_millis(seconds)), Some(seconds));
        }
        assert_eq!(format_millis(1_795_256_130), "2026-11-21T10:15:30.000Z");
        assert_eq!(format(u64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn other_spellings_are_read_and_what_is_no_moment_is_not() {
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

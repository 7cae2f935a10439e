//! Small damage to bytes, the same in every run.

/// SplitMix64: a few lines, and every seed gives another sequence.
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, or zero if there is none.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// A stretch of at most `longest` bytes.
    fn stretch(&mut self, bytes: &[u8], longest: usize) -> std::ops::Range<usize> {
        let start = self.below(bytes.len() + 1);
        let length = self.below(longest.min(bytes.len() - start) + 1);
        start..start + length
    }
}

/// Changes `bytes` in one to three ways; `others` and `words` are material. Most of what it does leaves JSON JSON, so that
/// what lies behind a parser is reached too.
pub(super) fn mutate(bytes: &mut Vec<u8>, others: &[Vec<u8>], words: &[Vec<u8>], random: &mut Random) {
    for _ in 0..=random.below(6).saturating_sub(3) {
        let at = random.below(bytes.len());
        match random.below(12) {
            0..3 => digit(bytes, random),
            3..5 => {
                let by = *random.pick(VALUES);
                value(bytes, by, random);
            }
            5..7 => {
                let other = random.pick(others);
                let range = value_of(other, random);
                value(bytes, &other[range], random);
            }
            7 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            8 => drop(bytes.drain(random.stretch(bytes, 16))),
            9 => {
                let copy = bytes[random.stretch(bytes, 256)].to_vec();
                drop(bytes.splice(at..at, copy));
            }
            10 => {
                let other = random.pick(others);
                let piece = other[random.stretch(other, 512)].to_vec();
                drop(bytes.splice(random.stretch(bytes, 64), piece));
            }
            _ => drop(bytes.splice(at..at, random.pick(words).clone())),
        }
    }
}

/// Values that fit wherever JSON wants one.
const VALUES: &[&[u8]] = &[
    b"null",
    b"true",
    b"0",
    b"1",
    b"-1",
    b"2",
    b"1e3",
    b"1e999",
    b"0.1",
    b"5e-324",
    b"18446744073709551616",
    b"\"\"",
    b"\"0\"",
    b"\"1000\"",
    b"\"-1\"",
    b"\"0x\"",
    b"\"eip155:8453\"",
    b"\"base\"",
    b"\"upfront\"",
    b"\"\\u0000\"",
    b"\"\\ud800\"",
    b"\"\xe2\x80\xae\"",
    b"[]",
    b"[[]]",
    b"[null,{}]",
    b"{}",
    b"{\"a\":1,\"a\":2}",
];

fn digit(bytes: &mut [u8], random: &mut Random) {
    let places: Vec<_> = (0..bytes.len()).filter(|place| bytes[*place].is_ascii_digit()).collect();
    if !places.is_empty() {
        bytes[*random.pick(&places)] = b'0' + random.below(10) as u8;
    }
}

fn value(bytes: &mut Vec<u8>, by: &[u8], random: &mut Random) {
    drop(bytes.splice(value_of(bytes, random), by.iter().copied()));
}

/// Where the value of some field of an object is: roughly, for it knows no strings. Empty where there are no fields.
fn value_of(bytes: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let colons: Vec<_> = (0..bytes.len()).filter(|place| bytes[*place] == b':').collect();
    if colons.is_empty() {
        return 0..0;
    }
    let start = *random.pick(&colons) + 1;
    let mut open = 0;
    for (length, byte) in bytes[start..].iter().enumerate() {
        match byte {
            b',' | b'}' | b']' if open == 0 => return start..start + length,
            b'{' | b'[' => open += 1,
            b'}' | b']' => open -= 1,
            _ => {}
        }
    }
    start..bytes.len()
}

/// The words of a libFuzzer dictionary: one a line in double quotes, with the escapes `\"`, `\\` and `\xAB`.
pub(super) fn words(dictionary: &str) -> Vec<Vec<u8>> {
    let lines = dictionary.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| word(line.strip_prefix('"').and_then(|line| line.strip_suffix('"')).expect("quoted"))).collect()
}

fn word(escaped: &str) -> Vec<u8> {
    let mut word = Vec::new();
    let mut rest = escaped.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        (rest, _) = match (first, after) {
            (b'\\', [b'x', high, low, after @ ..]) => {
                let digits = [*high, *low];
                let digits = std::str::from_utf8(&digits).expect("hex digits");
                (after, word.push(u8::from_str_radix(digits, 16).expect("hex digits")))
            }
            (b'\\', [byte, after @ ..]) => (after, word.push(*byte)),
            (byte, after) => (after, word.push(*byte)),
        };
    }
    word
}

#[test]
fn a_dictionary_is_read_as_libfuzzer_reads_it() {
    assert_eq!(words("# no word\n\"a\\\"\\\\u0000\\xff\"\n\n\"b\""), [b"a\"\\u0000\xff".to_vec(), b"b".to_vec()]);
}

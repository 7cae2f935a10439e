//! Tokens for those who have no tokenizer.

/// Tokens that are the bytes of a text, 0 to 255, and three more that mark where a prompt begins, where the completion does, and
/// where it ends.
///
/// ```
/// use atropos_client::Bytes;
///
/// let mut sequence = Bytes::prompt("1 + 1?");
/// sequence.extend(Bytes::completion("2"));
/// assert_eq!(sequence, [256, 49, 32, 43, 32, 49, 63, 257, 50, 258]);
/// assert_eq!(Bytes::text(&sequence), "1 + 1?2");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Bytes;

impl Bytes {
    /// Comes before a prompt.
    pub const BEGIN: u32 = 256;
    /// Comes between prompt and completion.
    pub const ANSWER: u32 = 257;
    /// Comes after a completion.
    pub const END: u32 = 258;
    /// How many tokens there are.
    pub const VOCABULARY: u32 = 259;

    /// The tokens of a prompt, up to where the completion begins.
    pub fn prompt(text: &str) -> Vec<u32> {
        let bytes = text.bytes().map(u32::from);
        std::iter::once(Self::BEGIN).chain(bytes).chain([Self::ANSWER]).collect()
    }

    /// The tokens of a completion, with its end.
    pub fn completion(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).chain([Self::END]).collect()
    }

    /// The text of tokens. Marks and unknown tokens are left out, and what is no UTF-8 is replaced.
    pub fn text(tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

//! What the packages beside this one use, too. It is no part of the public API.

pub use crate::{
    card::card_url,
    lock::lock,
    message::json_line,
    net::{BodyError, below, read_body},
    respond::{Refusal, document, json_response, receive},
};

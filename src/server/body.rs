//! Reads a request body whole, within bounds.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::Body;

pub(super) enum ReadError {
    TooLarge,
    TooSlow,
    Broken,
}

pub(super) async fn read_whole<B: Body<Data = Bytes>>(
    body: B,
    limit: usize,
    within: Duration,
) -> Result<Bytes, ReadError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(ReadError::TooLarge);
    }
    match read_up_to(pin!(body), limit, within).await? {
        (all, true) => Ok(all),
        (_, false) => Err(ReadError::TooLarge),
    }
}

/// Reads until the end, or until it has read more than `limit`; and whether it was the end.
pub(super) async fn read_up_to<B: Body<Data = Bytes>>(
    mut body: Pin<&mut B>,
    limit: usize,
    within: Duration,
) -> Result<(Bytes, bool), ReadError> {
    let read = async {
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        let mut is_over = true;
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|_| ReadError::Broken)?.into_data() else { continue };
            // Most bodies come in one piece, which then need not be copied.
            if first.is_empty() && all.is_empty() {
                first = data;
            } else {
                all.extend_from_slice(&std::mem::take(&mut first));
                all.extend_from_slice(&data);
            }
            if first.len() + all.len() > limit {
                is_over = false;
                break;
            }
        }
        Ok((if all.is_empty() { first } else { all.freeze() }, is_over))
    };
    tokio::time::timeout(within, read).await.unwrap_or(Err(ReadError::TooSlow))
}

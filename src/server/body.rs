//! Reads a request body whole, within bounds.

use std::{future::poll_fn, pin::pin, time::Duration};

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
    let read = async {
        let mut body = pin!(body);
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|_| ReadError::Broken)?.into_data() else { continue };
            if first.len() + all.len() + data.len() > limit {
                return Err(ReadError::TooLarge);
            }
            // Most bodies come in one piece, which then need not be copied.
            if first.is_empty() && all.is_empty() {
                first = data;
            } else {
                all.extend_from_slice(&std::mem::take(&mut first));
                all.extend_from_slice(&data);
            }
        }
        Ok(if all.is_empty() { first } else { all.freeze() })
    };
    tokio::time::timeout(within, read).await.unwrap_or(Err(ReadError::TooSlow))
}

//! Presenting one payment until an answer stands.

use std::{error::Error, time::Duration};

use bytes::Bytes;
use http::{Extensions, HeaderMap, StatusCode};
use tokio::time::{sleep, timeout};

use super::{
    Payer, Payment, PaymentError,
    demand::{Demand, Place},
    retry::Retry,
};
use crate::protocol::Version;

type BoxError = Box<dyn Error + Send + Sync>;

/// One paid request in the hands of an HTTP client, which can send it as often as need be.
pub(super) trait Carrier: Send {
    type Answer: Send;
    type Error: Into<BoxError> + Send;

    /// Sends the request, payment included, and waits for the head of the answer.
    fn carry(&mut self) -> impl Future<Output = Result<Self::Answer, Self::Error>> + Send;

    /// The body of an answer, if it is short and comes within `patience`, and the answer with its body in any case.
    fn open(answer: Self::Answer, patience: Duration) -> impl Future<Output = (Option<Bytes>, Self::Answer)> + Send;

    fn head(answer: &Self::Answer) -> (StatusCode, &HeaderMap);

    fn extensions(answer: &mut Self::Answer) -> &mut Extensions;
}

/// Has `payment` carried until an answer stands or presenting it again makes no sense; the answer gets the receipt.
pub(super) async fn present<C: Carrier>(
    payer: &Payer,
    retry: &Retry,
    mut payment: Payment,
    mut carrier: C,
) -> Result<C::Answer, PaymentError> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (answer, next) = match timeout(retry.attempt_timeout, carrier.carry()).await {
            Ok(Ok(answer)) => {
                let (body, answer) = refusal::<C>(answer, payment.version(), retry).await;
                let (status, headers) = C::head(&answer);
                let next = payment.answered(status, headers, body.as_deref());
                (Ok(answer), next)
            }
            Ok(Err(failure)) => (Err(failure.into()), payment.unanswered()),
            Err(elapsed) => (Err(elapsed.into()), payment.unanswered()),
        };
        if let Some(pause) = retry.pause(next, attempts, payer, &payment) {
            drop(answer);
            sleep(pause).await;
            continue;
        }
        let receipt = payment.conclude().await;
        return match answer {
            Ok(mut answer) => {
                C::extensions(&mut answer).insert(receipt);
                Ok(answer)
            }
            Err(source) => Err(PaymentError::Unanswered { receipt: Box::new(receipt), attempts, source }),
        };
    }
}

/// Opens an answer that may say in its body why it is a 402, as v1 does.
async fn refusal<C: Carrier>(answer: C::Answer, version: Version, retry: &Retry) -> (Option<Bytes>, C::Answer) {
    let (status, headers) = C::head(&answer);
    match Demand::place(status, headers) == Place::Body && version == Version::V1 {
        true => C::open(answer, retry.patience()).await,
        false => (None, answer),
    }
}

//! The journal with a test for its writer: no disk, and no clock.

use std::pin::pin;

use alloy_primitives::{Address, B256, Bytes, U256};
use futures_util::FutureExt as _;
use http::{HeaderMap, StatusCode};

use super::*;
use crate::{
    clock::ManualClock,
    eip3009::{Authorization, PaymentSignature},
    ledger::{
        Fingerprint, Fulfilment, FulfilmentStep, Ledger as _, Record, Reservation, ResponseLimits, Settlement,
        SqliteLedger, StoredResponse, Submission,
    },
    network::Network,
    payment::{Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentFlow},
};

fn payment(n: u8) -> PaymentKey {
    PaymentKey {
        network: Network::BASE,
        asset: Address::ZERO,
        payer: Address::repeat_byte(n),
        nonce: B256::repeat_byte(n),
    }
}

/// A journal whose writer is the test.
fn journal() -> (Journal, Writer) {
    let shared = Arc::new(Shared::default());
    let (alive, writing) = watch::channel(());
    (Journal { shared: shared.clone(), writing }, Writer { shared, _alive: alive })
}

impl Journal {
    async fn pay(&self, n: u8) -> Result<(), LedgerError> {
        self.begin()?.write(Changes::of_payments([payment(n)]))?.wait().await
    }

    fn note(&self, n: u8) {
        self.begin().unwrap().note(Changes::of_payments([payment(n)]));
    }
}

impl Writer {
    /// The payments that are to be written next, and what tells that they were.
    fn next(&self) -> Option<(HashSet<PaymentKey>, watch::Sender<bool>)> {
        let (batch, done) = self.shared.next(&MemoryLedger::default())?;
        Some((batch.payments.into_iter().map(|(key, _)| key).collect(), done))
    }
}

#[test]
fn what_comes_before_a_transaction_begins_shares_it_and_what_comes_later_the_next() {
    let (journal, writer) = journal();
    journal.note(1);
    let [mut first, mut second, mut third] = [2, 3, 4].map(|n| Box::pin(journal.pay(n)));
    assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
    let (payments, done) = writer.next().expect("somebody waits");
    assert_eq!(payments, [1, 2, 3].map(payment).into());
    assert!((&mut third).now_or_never().is_none());
    let mut reader = pin!(journal.settled_down());
    assert!((&mut reader).now_or_never().is_none(), "it may have seen what the third changed");
    done.send_replace(true);
    assert!(matches!((first.now_or_never(), second.now_or_never()), (Some(Ok(())), Some(Ok(())))));
    assert!((&mut third).now_or_never().is_none(), "this is not on disk");
    let (payments, done) = writer.next().expect("somebody waits");
    assert_eq!(payments, [payment(4)].into());
    let mut late = pin!(journal.settled_down());
    assert!((&mut late).now_or_never().is_none(), "what is being written can be seen already");
    done.send_replace(true);
    assert!(matches!((third.now_or_never(), reader.now_or_never()), (Some(Ok(())), Some(Ok(())))));
    assert!(matches!(late.now_or_never(), Some(Ok(()))));
}

#[test]
fn what_nobody_waits_for_is_taken_after_a_while_and_at_the_end() {
    let (journal, writer) = journal();
    journal.note(1);
    assert_eq!(writer.next().expect("it was long enough").0, [payment(1)].into());
    journal.note(2);
    drop(journal);
    assert_eq!(writer.next().expect("before it ends").0, [payment(2)].into());
    assert!(writer.next().is_none());
}

#[test]
fn a_writer_that_is_gone_is_waited_for_by_nobody() {
    let (journal, writer) = journal();
    let mut before = Box::pin(journal.pay(1));
    assert!((&mut before).now_or_never().is_none());
    drop(writer);
    assert!(matches!(before.now_or_never(), Some(Err(LedgerError::Backend(_)))));
    assert!(journal.check().is_err());
    assert!(matches!(journal.settled_down().now_or_never(), Some(Err(LedgerError::Backend(_)))));
}

const NOW: u64 = 1_800_000_000;

fn record(payer: u8, nonce: u64) -> Record {
    let offer = ExactOffer {
        asset: Network::BASE.usdc().unwrap(),
        amount: U256::from(10),
        pay_to: Address::repeat_byte(0xee),
        max_timeout_seconds: 60,
        flow: PaymentFlow::Authorization,
    };
    let authorization = Authorization {
        from: Address::repeat_byte(payer),
        to: offer.pay_to,
        value: offer.amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(NOW + 60),
        nonce: B256::from(U256::from(nonce)),
    };
    let payload = ExactPayload { signature: PaymentSignature::from(vec![1; 65]), authorization };
    let payment = precheck(Arc::new(Terms::new(offer)), payload, Window { remaining: 0, skew: 0 }, NOW).unwrap();
    Record::new(&payment, Fingerprint { digest: B256::ZERO, names_caller: false }, NOW, NOW + 30)
}

fn submission(payer: u8, nonce: u64, key: PaymentKey) -> Submission {
    let sender = Sender { network: key.network, address: Address::repeat_byte(payer) };
    let raw = Bytes::from_static(b"signed");
    Submission {
        sender,
        nonce,
        hash: key.nonce,
        raw,
        payments: vec![key],
        by: 1,
        at: NOW,
        until: NOW + 30,
        known_failures: Default::default(),
    }
}

/// Works on a payment and submits it.
async fn serve(ledger: &SqliteLedger, payer: u8, nonce: u64) {
    let Reservation::New(lease) = ledger.reserve(&record(payer, nonce)).await.unwrap() else { panic!("it is new") };
    let response = StoredResponse {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
        body: bytes::Bytes::from_static(b"good"),
        trailers: None,
        stored_at: NOW,
    };
    for step in [
        FulfilmentStep::Admit { funds: None, due: false },
        FulfilmentStep::Start { until: NOW + 30 },
        FulfilmentStep::Produce { body: None, at: NOW, response: Some(Arc::new(response)) },
    ] {
        ledger.fulfil(&lease, &step).await.unwrap();
    }
    ledger.submit(submission(payer, nonce, lease.key)).await.unwrap();
}

/// Each transaction may be the last one. The test writes none of them, and looks what a file would hold after it.
#[test]
fn no_payment_is_written_without_its_response_or_its_transaction() {
    let memory = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, Arc::new(ManualClock::at(NOW))));
    let (journal, writer) = journal();
    let ledger = Arc::new(SqliteLedger { memory: memory.clone(), journal });
    let sellers = [1, 2, 3, 4].map(|payer| {
        let ledger = ledger.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                for nonce in 0..1_000 {
                    serve(&ledger, payer, nonce).await;
                }
            });
        })
    });
    drop(ledger);
    let (mut produced, mut submitted) = (0, 0);
    let (mut responses, mut nonces) = (HashSet::new(), HashSet::new());
    while let Some((batch, done)) = writer.shared.next(&memory) {
        responses.extend(batch.responses.into_iter().map(|(key, response)| (key, response.is_some())));
        nonces.extend(batch.nonces.into_iter().map(|(sender, nonce, is)| (sender.address, nonce, is.is_some())));
        for (key, record) in batch.payments {
            let record = record.expect("none is forgotten");
            if record.fulfilment == Fulfilment::Produced {
                assert!(responses.contains(&(key, true)), "without its response");
                produced += 1;
            }
            if record.settlement == Settlement::Submitted {
                let nonce = U256::from_be_bytes(key.nonce.0).to();
                assert!(nonces.contains(&(key.payer, nonce, true)), "without its transaction");
                submitted += 1;
            }
        }
        done.send_replace(true);
    }
    assert!(produced >= 4_000 && submitted >= 4_000);
    for seller in sellers {
        seller.join().unwrap();
    }
}

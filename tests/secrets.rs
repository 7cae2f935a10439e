//! What must never be written down. Alone in its program, because the log of a program is one.

use std::{
    io,
    sync::{Arc, Mutex},
};

use alloy_primitives::hex;
use tower_x402::facilitator::{Facilitator, OnchainFacilitator};
use tracing_subscriber::filter::LevelFilter;

use support::engine_stage::*;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn neither_the_nodes_key_nor_a_payers_signature_is_in_any_span_event_or_error() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        .with_span_events(tracing_subscriber::fmt::format::FmtSpan::FULL)
        .with_writer(move || writer.clone())
        .init();
    let stage = stage().await;
    let port = stage.devnet.serve("127.0.0.1:0").await.unwrap();
    let mut url = port.url().clone();
    url.set_query(Some("key=SECRET"));
    let facilitator = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .rpc_url(&url)
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap();
    let key = stage.payer(2);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    paid_by(&facilitator.settle(&payment, &verified).await);
    facilitator.verify(&payment).await.unwrap_err();
    let late = stage.payment(&key);
    drop(port);
    let error = facilitator.verify(&late).await.unwrap_err();

    let said = String::from_utf8_lossy(&log.0.lock().unwrap()).to_lowercase() + &format!("{error:?} {facilitator:?}");
    assert!(said.contains("included"), "the log is looked at");
    assert!(!said.to_lowercase().contains("secret"));
    for payment in [payment, late] {
        // One half of it is enough to be alarmed.
        let half = hex::encode(&payment.signature().as_bytes()[..32]);
        // The chain in this process publishes the transaction, as chains do.
        let line = said.lines().find(|line| line.contains(&half) && !line.contains("trie::hash_builder"));
        assert_eq!(line.map(|line| &line[..line.len().min(300)]), None);
    }
}

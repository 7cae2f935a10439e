//! Payments on record from before fingerprints counted the values of a header.

use std::sync::{Arc, atomic::Ordering};

use alloy_primitives::B256;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use sha2::{Digest as _, Sha256};
use support::{
    scripted::{Scripted, customer, echo, layer, record, serve},
    shop::{Purchase, evaluate, send},
    sqlite_file,
};
use tower_x402::ledger::SqliteLedger;

const TOKEN: &str = "Bearer x";

fn with(name: &'static str, value: &str) -> Request<Body> {
    let mut request = evaluate("a");
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

/// Returns the fingerprint of the request here, with or without the number of values of `Authorization`.
fn digest(is_counted: bool) -> B256 {
    let number = 1_u64.to_be_bytes();
    let count = if is_counted { &[&number[..]][..] } else { &[] };
    let before = ["", "", "POST", "/evaluate", "k=1", "authorization"].map(str::as_bytes);
    let after = [TOKEN, "cookie"].map(str::as_bytes);
    let mut hash = Sha256::new();
    for part in before.iter().chain(count).chain(&after) {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    B256::from_slice(&hash.finalize())
}

fn on(ledger: &Arc<SqliteLedger>) -> Arc<Scripted> {
    let mut facilitator = Scripted::new();
    facilitator.ledger = ledger.clone();
    Arc::new(facilitator)
}

#[tokio::test]
async fn payment_in_flight_is_recognized_after_an_upgrade_of_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = Arc::new(SqliteLedger::open(&path).await.unwrap());
    let before = on(&ledger);
    let (app, _) = serve(layer(&before), |run, request| async move {
        match run {
            0 => echo(run, request).await,
            _ => Response::builder().status(StatusCode::INTERNAL_SERVER_ERROR).body(Body::empty()).unwrap(),
        }
    });
    let (answered, failed) = (customer().pay(&app, evaluate("a")).await, customer().pay(&app, evaluate("a")).await);
    let asked = |purchase: &Purchase| purchase.on(with("authorization", TOKEN));
    assert_eq!(send(&app, asked(&answered)).await.status, StatusCode::OK);
    assert_eq!(send(&app, asked(&failed)).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(record(&before, &answered).await.unwrap().request.digest, digest(true));
    ledger.close().await;
    drop((app, before, ledger));
    sqlite_file::change(
        &path,
        &format!("UPDATE payments SET record = replace(record, '{}', '{}')", digest(true), digest(false)),
    );

    let ledger = Arc::new(SqliteLedger::open(&path).await.unwrap());
    let after = on(&ledger);
    let (app, handled) = serve(layer(&after), echo);
    for purchase in [&answered, &failed] {
        assert_eq!(record(&after, purchase).await.unwrap().request.digest, digest(false));
        for other in [with("authorization", "Bearer y"), with("cookie", TOKEN), evaluate("a")] {
            assert_eq!(send(&app, purchase.on(other)).await.status, StatusCode::CONFLICT);
        }
    }
    assert_eq!((handled.load(Ordering::SeqCst), after.settlements()), (0, 0));
    for purchase in [&answered, &failed, &failed] {
        let answer = send(&app, asked(purchase)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    }
    assert_eq!((handled.load(Ordering::SeqCst), after.settlements()), (1, 1), "only what failed is worked for, once");
}

//! A journal that version 0.1.0 wrote, over two lives of its process: this version reads every entry and continues in the file.
//!
//! `files/journal-0.1.0.jsonl` begins with the sums of the first life, in which two payments were settled. The second life signed the
//! payments 3 to 8. It is never written again; a later format gets a file of its own.

use alloy_primitives::{Address, B256};
use tower_x402::{
    Network, Usdc,
    client::{Budget, Journal, JournalEntry, PaymentOutcome},
    protocol::Version,
};

use super::middleware;
use support::script::{Server, TempPath, offer, required, settled};

/// The payments that the file leaves open, by the first byte of their nonces, and their amounts: failed according to the server,
/// unknown, never answered, and in x402 v1 with a status page.
const OPEN: [(u8, u64); 4] = [(3, 100), (4, 1_000), (5, 10_000), (6, 100_000)];
const RESERVED: u64 = 111_100;
/// Paid in the first life to the first payee (11), and in the second one to the other.
const SPENT: u64 = 10_000_011;

fn file(name: &str) -> TempPath {
    let path = TempPath::new(name);
    std::fs::write(&path.0, include_str!("files/journal-0.1.0.jsonl")).unwrap();
    path
}

fn assert_is_as_written(entry: &JournalEntry, nonce: u8, amount: u64) {
    let is_v1 = nonce == 6;
    assert_eq!(entry.nonce, B256::repeat_byte(nonce));
    assert_eq!(entry.amount, Usdc::from_atomic(amount));
    assert_eq!((entry.signed_at, entry.valid_before), (1_000, 2_000));
    assert_eq!((entry.method.as_str(), entry.url.as_str()), ("POST", "http://127.0.0.1/evaluate?token=private"));
    assert_eq!((entry.network, entry.asset), (Network::BASE, Address::ZERO));
    assert_eq!((entry.payer, entry.pay_to), (Address::repeat_byte(1), Address::repeat_byte(2)));
    assert_eq!(entry.version, if is_v1 { Version::V1 } else { Version::V2 });
    assert_eq!(entry.status_url.as_deref(), is_v1.then_some("http://127.0.0.1/status/6"));
    assert_eq!(entry.payment, "bearer-data");
}

#[test]
fn a_journal_is_read_with_every_open_payment() {
    let path = file("earlier-read");
    for _ in 0..2 {
        let journal = Journal::open(&path.0).unwrap();
        let open = journal.unresolved();
        assert_eq!(open.len(), OPEN.len());
        for (entry, (nonce, amount)) in open.iter().zip(OPEN) {
            assert_is_as_written(entry, nonce, amount);
        }
        let budget = Budget::builder().journal(journal).build();
        assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (SPENT, RESERVED));
        let by_payee = [(Address::repeat_byte(2), 11), (Address::repeat_byte(9), 10_000_000)];
        assert_eq!(budget.spent_by_payee(), by_payee.map(|(payee, spent)| (payee, Usdc::from_atomic(spent))).into());
    }
}

#[test]
fn a_failed_payment_in_a_journal_is_released_when_it_has_expired() {
    let path = file("earlier-failed");
    let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).release_failed().build();
    budget.release_expired(2_059);
    assert_eq!(budget.reserved().atomic(), RESERVED);
    budget.release_expired(2_060);
    assert_eq!(budget.reserved().atomic(), RESERVED - 100);
}

#[tokio::test]
async fn a_journal_takes_the_next_payment_within_what_it_left_of_the_budget() {
    let path = file("earlier-next");
    let limit = Usdc::from_atomic(SPENT + RESERVED + 1_999);
    let opened = || Budget::builder().total(limit).journal(Journal::open(&path.0).unwrap()).build();
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = opened();
    let (_, receipt) = middleware::buy(&server, &budget).await.unwrap();
    assert_eq!(receipt.outcome, PaymentOutcome::Settled);
    let refused = middleware::buy(&server, &budget).await.unwrap_err();
    middleware::refusal(&refused);
    drop(budget);
    let budget = opened();
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (SPENT + 1_000, RESERVED));
}

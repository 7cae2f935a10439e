//! The same payments, presented by the same script to the official server and to ours: copies of one payment, and many
//! payments at once.
//!
//! `cargo test -p tower-x402-tests --features test-peers --test peers -- comparison --nocapture` prints the table of `docs/peers.md`.

use serde::Deserialize;
use tokio::time::timeout;

use super::{
    programs::{Bank, Seller, script},
    stage::{PATIENCE, Server, TASK, funded},
};
use support::{anvil::AnvilChain, chain::Chain};

/// The output of the script.
#[derive(Debug, Deserialize)]
struct Comparison {
    copies: Counts,
    distinct: Counts,
}

/// For payments that were sent at once: the number of handler runs, of answers 200 and 503, and of payments on the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct Counts {
    sent: usize,
    handlers: usize,
    ok: usize,
    later: usize,
    settled: usize,
}

#[tokio::test]
async fn eight_copies_settle_once_and_ten_payments_settle_ten_times_here_on_anvil() {
    let counted = compare(Seller::Evaluator, Bank::Own).await;
    assert_eq!(counted.copies, Counts { sent: 8, handlers: 1, ok: 8, later: 0, settled: 1 });
    assert_eq!(counted.distinct, Counts { sent: 10, handlers: 10, ok: 10, later: 0, settled: 10 });
}

/// The number of times that the official server runs its handler for copies may vary, whichever facilitator settles.
#[tokio::test]
async fn our_facilitator_settles_ten_payments_of_ten_for_the_official_express_server_on_anvil() {
    let counted = compare(Seller::Express, Bank::Ours).await;
    assert_eq!(counted.copies.settled, 1);
    assert_eq!(counted.distinct, Counts { sent: 10, handlers: 10, ok: 10, later: 0, settled: 10 });
}

/// The other project's numbers are counted, and only checked where `docs/peers.md` states them.
#[tokio::test]
async fn eight_copies_run_many_handlers_in_the_official_express_server_on_anvil() {
    let counted = compare(Seller::Express, Bank::Official).await;
    assert!(counted.copies.handlers > 1, "the official server came to run one handler: docs/peers.md says otherwise");
    assert_eq!(counted.copies.settled, 1);
    assert!(counted.distinct.settled <= counted.distinct.handlers);
}

/// Copies are one payment with the official facilitator, too. Of ten payments at once it may settle only some; the others are unknown,
/// and none is lost.
#[tokio::test]
async fn eight_copies_settle_once_here_with_the_official_facilitator_on_anvil() {
    let counted = compare(Seller::Evaluator, Bank::Official).await;
    assert_eq!((counted.copies.handlers, counted.copies.settled), (1, 1));
    let Counts { handlers, ok, later, .. } = counted.distinct;
    assert_eq!((handlers, ok + later), (10, 10));
}

/// Runs the script, and checks its counts on the chain.
async fn compare(seller: Seller, bank: Bank) -> Comparison {
    let chain = AnvilChain::start(None).await;
    let server = Server::open(&chain, seller, bank, "authorization").await;
    let buyer = funded(&chain).await;
    let mut program = script(["node", "compare.mjs"]);
    program.arg(&server.url).env("PRIVATE_KEY", buyer.to_bytes().to_string());
    program.env("RPC_URL", chain.rpc_url()).env("TASK", TASK);
    let output = timeout(PATIENCE, program.output()).await.expect("the script ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let counted: Comparison = serde_json::from_slice(&output.stdout).unwrap();

    let Comparison { copies, distinct } = counted;
    println!("| server | settled by | sent | handlers run | answers 200 | answers 503 | settled on chain |");
    for (what, Counts { sent, handlers, ok, later, settled }) in [("copies of one", copies), ("payments", distinct)] {
        println!("| {seller:?} | {bank:?} | {sent} {what} | {handlers} | {ok} | {later} | {settled} |");
    }
    assert_eq!((copies.sent, distinct.sent), (8, 10));
    assert_eq!(chain.token_transfers(server.pay_to).await.len(), copies.settled + distinct.settled);
    counted
}

//! The flows of a payment: what clients, node and time do in each, if no call of the ledger fails.

use std::time::Duration;

use futures_util::future::{BoxFuture, join};
use tokio::time::sleep;
use x402_devnet::{Fault as NodeFault, Orphans};

use super::scene::{Mover, Scene, Setting, Work};

type Part = for<'a> fn(&'a mut Scene) -> BoxFuture<'a, ()>;

#[derive(Clone, Copy)]
pub struct Flow {
    pub name: &'static str,
    pub setting: Setting,
    /// Runs before calls are counted.
    pub prepare: Part,
    pub play: Part,
}

const PLAIN: Setting = Setting {
    is_upfront: false,
    is_deferred: false,
    mover: Mover::Onchain,
    work: Work::Echo,
    is_theirs: false,
    can_batch: false,
    finality: 0,
};
const UPFRONT: Setting = Setting { is_upfront: true, ..PLAIN };
const REMOTE: Setting = Setting { mover: Mover::Remote, ..PLAIN };

const SYNC: &str = "eth_sendRawTransactionSync";
const SEND: &str = "eth_sendRawTransaction";
const RECEIPT: &str = "eth_getTransactionReceipt";

const fn flow(name: &'static str, setting: Setting, play: Part) -> Flow {
    Flow { name, setting, prepare: nothing, play }
}

/// Payments for complete responses, with a working node.
pub const PLAIN_FLOWS: &[Flow] = &[
    flow("authorization", PLAIN, buy_and_repeat),
    flow("upfront", UPFRONT, buy_and_repeat),
    flow("work fails", Setting { work: Work::FailOnce, ..PLAIN }, buy_again),
    flow("work fails, upfront", Setting { work: Work::FailOnce, ..UPFRONT }, buy_again),
    flow("money is gone", Setting { work: Work::DrainOnce, ..PLAIN }, pay_later),
    flow("money never comes", Setting { work: Work::DrainOnce, ..PLAIN }, never_pay),
    flow("money comes late", PLAIN, fund_later),
    flow("copies", PLAIN, copies),
    flow("batch", Setting { can_batch: true, ..PLAIN }, together),
    flow("batch, upfront", Setting { can_batch: true, ..UPFRONT }, together),
    flow("price changes", PLAIN, change_the_price),
    flow("contract wallet", PLAIN, pay_from_a_wallet),
];

/// Responses on credit, and streamed responses, which are not complete when they are settled.
pub const LATE_FLOWS: &[Flow] = &[
    Flow { name: "deferred", setting: Setting { is_deferred: true, ..PLAIN }, prepare: buy_once, play: buy_on_credit },
    Flow { name: "drained", setting: Setting { is_deferred: true, ..PLAIN }, prepare: buy_once, play: drain },
    Flow {
        name: "deferred, node refuses",
        setting: Setting { is_deferred: true, ..PLAIN },
        prepare: buy_once,
        play: credit_in_vain,
    },
    flow("stream", Setting { work: Work::Stream, ..PLAIN }, buy_and_repeat),
    flow("stream, client goes away", Setting { work: Work::Stream, ..PLAIN }, leave_in_the_middle),
    flow("stream, node is silent", Setting { work: Work::Stream, ..PLAIN }, lose_sight),
    flow("stream, node refuses", Setting { work: Work::Stream, ..PLAIN }, refused_by_the_node),
];

/// Nodes that refuse or lose transactions, and chains that reorganize.
pub const NODE_FLOWS: &[Flow] = &[
    flow("node refuses", PLAIN, refused_by_the_node),
    flow("node refuses, upfront", UPFRONT, refused_by_the_node),
    flow("node is silent", PLAIN, lose_sight),
    flow("node is silent, upfront", UPFRONT, lose_sight),
    flow("node answers nothing", PLAIN, lose_the_answer),
    flow("node answers nothing, upfront", UPFRONT, lose_the_answer),
    flow("gas gets dear", PLAIN, raise),
    flow("reorganized", Setting { finality: 4, ..PLAIN }, reorganize),
];

/// A remote facilitator; the seller's ledger fails.
pub const REMOTE_FLOWS: &[Flow] = &[
    flow("remote", REMOTE, buy_and_repeat),
    flow("remote, upfront", Setting { is_upfront: true, ..REMOTE }, buy_and_repeat),
    flow("remote, confirmed", Setting { mover: Mover::Confirmed, ..PLAIN }, buy_and_repeat),
    Flow {
        name: "remote, deferred",
        setting: Setting { is_deferred: true, ..REMOTE },
        prepare: buy_once,
        play: buy_on_credit,
    },
    flow("remote, node is silent", REMOTE, lose_sight),
    flow("remote, node is silent, upfront", Setting { is_upfront: true, ..REMOTE }, lose_sight),
    flow("remote, away", REMOTE, find_nobody),
    flow("remote, away, upfront", Setting { is_upfront: true, ..REMOTE }, find_nobody),
    flow("remote, money is gone", Setting { work: Work::DrainOnce, ..REMOTE }, pay_later),
];

/// A remote facilitator; the facilitator's ledger fails.
pub const FACILITATOR_FLOWS: &[Flow] = &[
    flow("facilitator's ledger", Setting { is_theirs: true, ..REMOTE }, buy_and_repeat),
    flow("facilitator's ledger, upfront", Setting { is_theirs: true, is_upfront: true, ..REMOTE }, buy_and_repeat),
    flow("facilitator's ledger, node refuses", Setting { is_theirs: true, ..REMOTE }, refused_by_the_node),
    flow("facilitator's ledger, node is silent", Setting { is_theirs: true, ..REMOTE }, lose_sight),
];

pub const FLOWS: [&[Flow]; 5] = [PLAIN_FLOWS, LATE_FLOWS, NODE_FLOWS, REMOTE_FLOWS, FACILITATOR_FLOWS];

fn nothing(_: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {})
}

/// Lets a customer pay once, so that it gets credit.
fn buy_once(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(5);
        let first = scene.sign(&customer, "first").await;
        scene.insist(first).await;
        scene.upkeep(1).await;
        scene.customers.push(customer);
    })
}

fn buy_and_repeat(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.insist(payment).await;
        // The client lost the answer.
        scene.present(payment).await;
        scene.upkeep(2).await;
    })
}

fn buy_on_credit(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customers[0].clone();
        let payment = scene.sign(&customer, "y").await;
        scene.insist(payment).await;
        scene.present(payment).await;
        scene.upkeep(2).await;
    })
}

fn drain(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customers[0].clone();
        let payment = scene.sign(&customer, "y").await;
        scene.present(payment).await;
        scene.drain_and_restart().await;
        scene.upkeep(1).await;
    })
}

fn credit_in_vain(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customers[0].clone();
        let payment = scene.sign(&customer, "y").await;
        refuse(scene);
        scene.present(payment).await;
        scene.upkeep(1).await;
        scene.node_is_well();
        scene.insist(payment).await;
        scene.upkeep(2).await;
    })
}

fn leave_in_the_middle(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present_and_leave(payment).await;
        scene.upkeep(1).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

fn buy_again(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present(payment).await;
        scene.upkeep(1).await;
        scene.insist(payment).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

fn pay_later(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present(payment).await;
        let payer = scene.payer(payment);
        scene.mint(payer, 1);
        scene.upkeep(1).await;
        scene.insist(payment).await;
        scene.upkeep(2).await;
    })
}

fn never_pay(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present(payment).await;
        sleep(Duration::from_secs(700)).await;
        scene.devnet.mine();
        scene.upkeep(2).await;
    })
}

fn fund_later(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(0);
        let payment = scene.sign(&customer, "x").await;
        scene.present(payment).await;
        let payer = scene.payer(payment);
        scene.mint(payer, 1);
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

/// Makes the node refuse transactions: the settlement key cannot pay for gas.
fn refuse(scene: &Scene) {
    scene.node_does(|method| match method {
        SYNC | SEND => {
            NodeFault::Error { code: -32000, message: "insufficient funds for gas * price + value".to_owned() }
        }
        "eth_getBalance" => NodeFault::Error { code: -32000, message: "not now".to_owned() },
        _ => NodeFault::None,
    });
}

fn refused_by_the_node(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        refuse(scene);
        scene.present(payment).await;
        scene.upkeep(1).await;
        scene.node_is_well();
        scene.upkeep(4).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

/// Transactions do not reach the node for a while, so their outcome is unknown.
fn lose_sight(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.node_does(|method| match method {
            SYNC | SEND => NodeFault::DropBefore,
            _ => NodeFault::None,
        });
        scene.present(payment).await;
        scene.upkeep(1).await;
        scene.node_is_well();
        scene.upkeep(1).await;
        scene.insist(payment).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

/// Transactions reach the node, and its answers are lost for a while.
fn lose_the_answer(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.node_does(|method| match method {
            SYNC | SEND => NodeFault::DropAfter,
            RECEIPT => NodeFault::DropBefore,
            _ => NodeFault::None,
        });
        scene.present(payment).await;
        scene.node_is_well();
        scene.insist(payment).await;
        scene.upkeep(2).await;
    })
}

/// Blocks stall, and then the base fee exceeds what the transaction offers.
fn raise(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.devnet.stall(true);
        let devnet = scene.devnet.clone();
        let dear = async {
            sleep(Duration::from_millis(1_000)).await;
            devnet.set_base_fee(1_000_000_000);
            devnet.stall(false);
        };
        join(scene.present(payment), dear).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

fn copies(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present_together(&[payment, payment, payment]).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

fn together(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let mut payments = Vec::new();
        for text in ["x", "y", "z"] {
            let customer = scene.customer(1);
            payments.push(scene.sign(&customer, text).await);
        }
        scene.present_together(&payments).await;
        for payment in payments {
            scene.insist(payment).await;
        }
        scene.upkeep(2).await;
    })
}

/// A reorganization removes the transaction, and the node has forgotten it.
fn reorganize(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        let before = scene.devnet.block_number();
        scene.insist(payment).await;
        scene.upkeep(1).await;
        scene.devnet.reorg(scene.devnet.block_number() - before, Orphans::Lost);
        scene.upkeep(3).await;
        scene.present(payment).await;
        scene.upkeep(4).await;
    })
}

fn change_the_price(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.present(payment).await;
        scene.set_price(2_000);
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

fn pay_from_a_wallet(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.wallet(1);
        let payment = scene.sign(&customer, "x").await;
        scene.insist(payment).await;
        scene.present(payment).await;
        scene.upkeep(1).await;
    })
}

/// The facilitator cannot be reached for a while when it is asked to settle.
fn find_nobody(scene: &mut Scene) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let customer = scene.customer(1);
        let payment = scene.sign(&customer, "x").await;
        scene.facilitator_closes_after_verifying();
        scene.present(payment).await;
        scene.upkeep(1).await;
        scene.facilitator_opens().await;
        scene.upkeep(2).await;
        scene.insist(payment).await;
        scene.upkeep(1).await;
    })
}

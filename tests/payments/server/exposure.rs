//! The most that a cheating payer costs the seller, in every flow.
//!
//! Each payment is valid when it is verified, and the payer invalidates it when its transaction is on the way to the node. The seller can
//! lose content that was delivered unpaid, work, and gas.
//!
//! | flow | content | work | gas |
//! |---|---|---|---|
//! | `authorization` | nothing | two runs of the handler | two transactions |
//! | `upfront` | nothing | nothing | two transactions |
//! | `deferred` | the credit of one payer | as many runs more as `authorization` | two transactions more |
//!
//! Then the payer has to wait, longer each time, before another payment of it is verified.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::{SolCall as _, sol};
use support::{
    authorization::{self, CancelAuthorization, TransferWithAuthorization, random_address},
    chain::Chain,
    devnet::DevnetChain,
    scripted::key,
    shop::{Customer, PRICE, Purchase, Shop, evaluate, send},
    token::{Token, cancel_vrs, transfer_vrs},
};
use tower_x402::{
    Usdc,
    facilitator::Facilitator as _,
    protocol::PaymentFlow,
    server::{DeferredPolicy, RequirePaymentLayerBuilder},
};
use x402_devnet::Fault;

sol! {
    function setAccepting(bool accepting);
}

/// The number of attempts.
const TRIES: u64 = 6;
/// The number of payments that one payer may owe, and has made before.
const CREDIT: u64 = 3;
/// Gas of a single transaction at most (400,000 for the transfer, and what a transaction takes besides), and its price.
const MAX_GAS: u64 = 500_000;
const MAX_GAS_PRICE: u64 = 20_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Trick {
    Drain,
    Cancel,
    PaySelf,
    RefuseAsWallet,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Authorization,
    Upfront,
    Deferred,
}

impl Flow {
    fn of(self, layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
        let credit = Usdc::from_atomic(CREDIT * PRICE);
        match self {
            Self::Authorization => layer,
            Self::Upfront => layer.flow(PaymentFlow::Upfront),
            Self::Deferred => layer.deferred(DeferredPolicy::default().per_payer(credit)),
        }
    }
}

/// The call that invalidates a payment, and its sender.
fn spoiled_by(trick: Trick, cheat: &Customer, purchase: &Purchase, balance: u64) -> (Address, Address, Bytes) {
    let token = purchase.asset.address;
    let data = match trick {
        Trick::Drain => Token::transferCall { to: random_address(), value: U256::from(balance) }.abi_encode(),
        Trick::Cancel => {
            let message = CancelAuthorization { authorizer: cheat.from, nonce: purchase.authorization.nonce };
            let signature = authorization::sign(&cheat.signer, &purchase.asset, &message);
            cancel_vrs(&message, &signature).abi_encode()
        }
        Trick::PaySelf => {
            let message = TransferWithAuthorization { to: cheat.from, ..purchase.authorization.clone() };
            let signature = authorization::sign(&cheat.signer, &purchase.asset, &message);
            transfer_vrs(&message, &signature).abi_encode()
        }
        Trick::RefuseAsWallet => {
            return (cheat.signer.address(), cheat.from, setAcceptingCall { accepting: false }.abi_encode().into());
        }
    };
    (cheat.from, token, data.into())
}

async fn cost_of_a_cheating_payer_is_bounded(trick: Trick, flow: Flow) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(flow.of(shop.layer()));
    let mut cheat = Customer::with_funds(&chain, 0).await;
    if trick == Trick::RefuseAsWallet {
        cheat.from = chain.deploy_wallet(cheat.signer.address()).await;
    }
    chain.mint(cheat.from, CREDIT * PRICE).await;
    let in_line = shop.app(shop.layer());
    for _ in 0..CREDIT {
        let honest = cheat.pay(&in_line, evaluate("x")).await;
        assert_eq!(send(&in_line, honest.on(evaluate("x"))).await.status, 200, "a customer like any other, so far");
    }
    let (stats, tank) = (shop.facilitator.stats(), shop.facilitator.gas_balance().await.unwrap());

    let spoil: Arc<Mutex<Vec<(Address, Address, Bytes)>>> = Arc::default();
    let was_sent = Arc::new(AtomicBool::new(false));
    chain.devnet.faults().set({
        let (devnet, spoil, was_sent) = (chain.devnet.clone(), spoil.clone(), was_sent.clone());
        move |call| {
            if call.method.starts_with("eth_sendRawTransaction") {
                was_sent.store(true, Ordering::SeqCst);
                for (from, to, data) in spoil.lock().unwrap().drain(..) {
                    // A payment that is paid or invalid already cannot be invalidated.
                    let _ = devnet.execute(from, to, data);
                }
            }
            Fault::None
        }
    });
    let (mut served, mut tried) = (0, Vec::new());
    for _ in 0..TRIES {
        if trick == Trick::RefuseAsWallet {
            let data = setAcceptingCall { accepting: true }.abi_encode();
            chain.devnet.execute(cheat.signer.address(), cheat.from, data).unwrap();
        }
        chain.mint(cheat.from, (TRIES * PRICE).saturating_sub(chain.balance(cheat.from).await)).await;
        let purchase = cheat.pay(&app, evaluate("x")).await;
        let plan = spoiled_by(trick, &cheat, &purchase, TRIES * PRICE);
        spoil.lock().unwrap().push(plan);
        served += u64::from(send(&app, purchase.on(evaluate("x"))).await.status == 200);
        tried.push(purchase);
    }
    for purchase in &tried {
        until_its_fate_is_known(&shop, purchase).await;
    }
    assert!(was_sent.load(Ordering::SeqCst), "the trick was played");

    let paid = chain.balance(shop.pay_to).await / PRICE - CREDIT;
    let runs = shop.handled() - CREDIT;
    let after = shop.facilitator.stats();
    let wasted = after.reverted - stats.reverted;
    let gas = tank - shop.facilitator.gas_balance().await.unwrap();
    let (content, work) = match flow {
        Flow::Authorization => (0, 2),
        Flow::Upfront => (0, 0),
        Flow::Deferred => (CREDIT, CREDIT + 2),
    };
    let transactions = if flow == Flow::Deferred { CREDIT + 2 } else { 2 };
    assert!(wasted >= 1, "the trick worked at first");
    assert!(wasted <= transactions, "{wasted} transactions for nothing");
    assert!(served - paid.min(served) <= content, "{served} answers for {paid} payments");
    assert!(runs - paid.min(runs) <= work, "{runs} runs of the handler for {paid} payments");
    let bound = U256::from((transactions + paid) * MAX_GAS * MAX_GAS_PRICE);
    assert!(gas > U256::ZERO && gas <= bound, "{gas} wei for gas, {bound} at most");
    if flow == Flow::Deferred {
        assert!(served > paid, "credit is what can be lost");
    } else {
        assert_eq!(served, paid, "who got an answer has paid");
    }
}

/// Waits until no transaction of a payment is in flight.
async fn until_its_fate_is_known(shop: &Shop, purchase: &Purchase) {
    let looking = async {
        loop {
            let record = shop.facilitator.ledger().get(&key(purchase)).await.unwrap();
            // A payment that was refused before work has no record.
            if record.is_none_or(|record| record.settlement.paid_by().is_some() || record.last_failure.is_some()) {
                return;
            }
            shop.facilitator.reconcile_now();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), looking).await.expect("a fate");
}

macro_rules! in_every_flow {
    ($($name:ident: $trick:ident),* $(,)?) => {
        $(mod $name {
            use super::*;

            #[tokio::test]
            async fn cheating_payer_costs_two_transactions_and_their_work() {
                cost_of_a_cheating_payer_is_bounded(Trick::$trick, Flow::Authorization).await;
            }

            #[tokio::test]
            async fn cheating_payer_costs_two_transactions_upfront() {
                cost_of_a_cheating_payer_is_bounded(Trick::$trick, Flow::Upfront).await;
            }

            #[tokio::test]
            async fn cheating_payer_costs_its_credit_when_deferred() {
                cost_of_a_cheating_payer_is_bounded(Trick::$trick, Flow::Deferred).await;
            }
        })*
    };
}

in_every_flow! {
    a_payer_that_drains_its_balance: Drain,
    a_payer_that_cancels: Cancel,
    a_payer_that_pays_itself_with_the_nonce: PaySelf,
    a_wallet_that_changes_its_mind: RefuseAsWallet,
}

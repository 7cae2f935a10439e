//! Whether a payment was made, as anybody can look it up on a chain.

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    Network,
    chain::{Finality, LookupError, PaymentLookup, PaymentState, SoughtCharge, SoughtPayment},
};
use x402_devnet::Orphans;

use support::{
    authorization::{authorization, sign},
    chain::Chain,
    devnet::DevnetChain,
    escrow::{Channel, claim_call, send},
    rpc_proxy::{Fate, RpcProxy},
    token::transfer_vrs,
};

/// A payment of 1,000 units to this payee, and its transaction.
async fn pay(chain: &DevnetChain, payee: Address) -> (SoughtPayment, B256) {
    let payer = PrivateKeySigner::random();
    chain.mint(payer.address(), 1_000).await;
    let message = authorization(payer.address(), payee, 1_000);
    let signature = sign(&payer, &chain.asset(), &message);
    let receipt = chain.relayer().await.send(chain, transfer_vrs(&message, &signature)).await;
    let token = chain.asset().address;
    let nonce = message.nonce;
    let payment = SoughtPayment { token, payer: payer.address(), payee, amount: U256::from(1_000), nonce };
    (payment, receipt.transaction_hash)
}

#[tokio::test]
async fn payment_is_found_with_and_without_its_transaction() {
    let chain = DevnetChain::start(None).await;
    let (payment, transaction) = pay(&chain, Address::repeat_byte(2)).await;
    let lookup = PaymentLookup::at_url(Network::BASE_SEPOLIA, chain.rpc_url()).unwrap();
    let PaymentState::Made(mined) = lookup.transaction(&payment, transaction).await.unwrap() else {
        panic!("it was made")
    };
    assert_eq!((mined.transaction, mined.block_time), (transaction, chain.timestamp().await));
    assert_eq!(mined.block, mined.latest);
    assert_eq!(lookup.search(&payment, 100).await, Ok(PaymentState::Made(mined)));
}

#[tokio::test]
async fn other_payments_do_not_match() {
    let chain = DevnetChain::start(None).await;
    let (payment, transaction) = pay(&chain, Address::repeat_byte(2)).await;
    let lookup = PaymentLookup::at_url(Network::BASE_SEPOLIA, chain.rpc_url()).unwrap();
    let unused = SoughtPayment { nonce: B256::repeat_byte(9), ..payment };
    assert_eq!(lookup.transaction(&unused, transaction).await, Ok(PaymentState::NotThis));
    assert_eq!(lookup.search(&unused, 100).await, Ok(PaymentState::NotFound));
    assert_eq!(lookup.transaction(&payment, B256::repeat_byte(9)).await, Ok(PaymentState::NotMined));
    for other in [
        SoughtPayment { amount: U256::from(1_001), ..payment },
        SoughtPayment { payee: Address::repeat_byte(3), ..payment },
    ] {
        assert_eq!(lookup.transaction(&other, transaction).await, Ok(PaymentState::NotThis));
        assert_eq!(lookup.search(&other, 100).await, Ok(PaymentState::UsedOtherwise));
    }
}

/// Of several nodes behind one address, the one that is asked for the receipt has not seen that another block has its number now.
#[tokio::test]
async fn receipt_from_a_replaced_block_shows_no_payment() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let (payment, transaction) = pay(&chain, Address::repeat_byte(2)).await;
    let lookup = PaymentLookup::at_url(Network::BASE_SEPOLIA, proxy.url()).unwrap();
    let made = lookup.transaction(&payment, transaction).await;
    let Ok(PaymentState::Made(mined)) = made else { panic!("{made:?}") };
    assert_eq!(lookup.finality(&payment, transaction, mined.block).await, Ok(Finality::Final));

    proxy.judge(|methods| if methods[0] == "eth_getTransactionReceipt" { Fate::Stale } else { Fate::Pass });
    chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(lookup.transaction(&payment, transaction).await, Ok(PaymentState::Replaced));
    assert_eq!(lookup.finality(&payment, transaction, mined.block).await, Ok(Finality::Open));
}

#[tokio::test]
async fn charge_is_found_in_the_transaction_that_claimed_all_of_it() {
    let chain = DevnetChain::start(None).await;
    let lookup = PaymentLookup::at_url(Network::BASE_SEPOLIA, chain.rpc_url()).unwrap();
    let (relayer, authorizer) = (chain.relayer().await, PrivateKeySigner::random());
    let mut channels = Vec::new();
    for _ in 0..2 {
        let channel = Channel::funded(&chain, Address::repeat_byte(2), &authorizer, 10_000).await;
        channel.deposit(&chain, &relayer, 10_000).await;
        channels.push(channel);
    }
    let sought = |channel: &Channel, charged, amount| SoughtCharge { channel: channel.id(), charged, amount };
    // Claimed once alone, and then together with the other channel.
    let rows = [channels[0].row(10_000, 1_000).await, channels[0].row(10_000, 3_000).await];
    let first = send(&chain, &relayer, &claim_call(&rows[..1], &authorizer)).await.transaction_hash;
    let both = [channels[1].row(10_000, 5_000).await, rows[1].clone()];
    let second = send(&chain, &relayer, &claim_call(&both, &authorizer)).await.transaction_hash;
    for (channel, charged, amount, by) in
        [(0, 1_000, 1_000, first), (0, 500, 1, first), (0, 2_000, 1_000, second), (1, 5_000, 5_000, second)]
    {
        let charge = sought(&channels[channel], charged, amount);
        let PaymentState::Made(mined) = lookup.search_claim(&charge, 100).await.unwrap() else {
            panic!("{charge:?} was claimed")
        };
        assert_eq!(mined.transaction, by);
        assert_eq!(lookup.claim(&charge, by).await, Ok(PaymentState::Made(mined)));
        assert_eq!(lookup.claim_finality(&charge, by, mined.block).await, Ok(Finality::Final));
    }
    let across = sought(&channels[0], 1_500, 1_000);
    assert_eq!(lookup.search_claim(&across, 100).await, Ok(PaymentState::NotThis));
    assert_eq!(lookup.claim(&sought(&channels[0], 1_000, 1_000), second).await, Ok(PaymentState::NotThis));
    assert_eq!(lookup.claim(&sought(&channels[0], 1_000, 2_000), first).await, Ok(PaymentState::NotThis));
    assert_eq!(lookup.claim(&across, B256::repeat_byte(9)).await, Ok(PaymentState::NotMined));
    assert_eq!(lookup.search_claim(&sought(&channels[1], 5_000, 1), 0).await, Ok(PaymentState::NotFound));

    // What is not claimed is not searched for.
    chain.devnet.faults().reset();
    assert_eq!(lookup.search_claim(&sought(&channels[0], 3_001, 1), 100).await, Ok(PaymentState::NotFound));
    assert!(!chain.devnet.faults().calls().contains_key("eth_getLogs"), "{:?}", chain.devnet.faults().calls());
}

#[tokio::test]
async fn node_of_another_chain_and_bad_url_are_errors() {
    let chain = DevnetChain::start(None).await;
    let (payment, transaction) = pay(&chain, Address::repeat_byte(2)).await;
    let lookup = PaymentLookup::at_url(Network::BASE, chain.rpc_url()).unwrap();
    assert_eq!(lookup.transaction(&payment, transaction).await, Err(LookupError::OtherChain));
    assert!(matches!(PaymentLookup::at_url(Network::BASE, "ftp://key@node.example"), Err(LookupError::Url)));
}

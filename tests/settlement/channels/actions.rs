//! Each action moves exactly what it says, once.

use alloy_primitives::{U256, hex};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use futures_util::future::join_all;
use support::{
    authorization::random_address,
    chain::{Chain, Relayer, on_every_chain},
    escrow::{Channel, refund_call, send},
};
use tower_x402::{
    facilitator::channels::{ChannelError, ChannelFacilitator as _, Settled},
    vouchers::{
        AuthorizerKey,
        abi::BatchSettlement::{self as escrow, claimCall, claimWithSignatureCall},
        reason,
    },
};

use super::{authorizer, builder, channels, gas_key, order, reason as code};

on_every_chain! {
    channels_are_read_in_the_order_asked_for_as_of_one_block,
    a_deposit_is_executed_once_however_often_it_is_asked_for,
    copies_of_a_deposit_at_once_share_a_transaction,
    two_processes_with_one_deposit_report_the_same_transaction,
    claims_and_settlements_move_what_they_say,
    bad_rows_are_left_out_wherever_they_are,
    the_authorizer_itself_claims_without_a_signature,
    a_refund_claims_first_and_is_found_again,
    a_refund_without_a_claim_is_found_again,
    a_refund_shrinks_a_pending_withdrawal,
}

async fn channel(chain: &dyn Chain) -> Channel {
    Channel::funded(chain, random_address(), &PrivateKeySigner::random(), 100_000).await
}

async fn soon(chain: &dyn Chain) -> u64 {
    chain.timestamp().await + 3_600
}

async fn channels_are_read_in_the_order_asked_for_as_of_one_block(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let (filled, unknown) = (channel(chain).await, channel(chain).await);
    let relayer = chain.relayer().await;
    filled.deposit(chain, &relayer, 10_000).await;
    chain.fund(filled.config.payer, U256::from(10).pow(U256::from(20))).await;
    let by_payer = Relayer::of(&chain.rpc_url(), filled.payer.clone());
    let initiate = escrow::initiateWithdrawCall { config: (&filled.config).into(), amount: 6_000 };
    assert!(send(chain, &by_payer, &initiate).await.status());
    let announced_at = chain.timestamp().await;

    // More than fit into one call.
    let mut asked = vec![unknown.id(); 450];
    asked.push(filled.id());
    let observed = channels.observe(&asked).await.unwrap();
    assert_eq!(observed.len(), asked.len());
    assert!(observed.iter().zip(&asked).all(|(observed, id)| observed.state.channel_id == *id));
    assert!(observed.iter().all(|other| other.block == observed[0].block));
    assert_eq!(observed[0].block, chain.block_number().await);
    let (empty, last) = (observed[0].state, observed[450]);
    assert_eq!((empty.balance, empty.total_claimed, empty.withdraw_requested_at, empty.refund_nonce), (0, 0, 0, 0));
    assert_eq!((last.state.balance, last.state.total_claimed, last.withdrawal), (10_000, 0, 6_000));
    assert_eq!(last.state.withdraw_requested_at, announced_at);
    assert_eq!(channels.observe(&[]).await.unwrap(), []);
}

async fn a_deposit_is_executed_once_however_often_it_is_asked_for(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = channel(chain).await;
    let deposit = channel.sign_deposit(chain, 10_000, soon(chain).await).await;
    let before = channels.verify_deposit(&channel.config, &deposit).await.unwrap();
    assert_eq!((before.state.channel_id, before.state.balance), (channel.id(), 0));
    assert_eq!(channel.state(chain).await, (0, 0), "verifying changes nothing");

    let done = channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!((done.amount, done.observed.state.balance), (10_000, 10_000));
    let receipt = chain.receipt(done.transaction).await;
    assert!(receipt.status() && receipt.block_number == Some(done.observed.block));
    let again = channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!((again.transaction, again.amount), (done.transaction, 10_000));
    // A process that knows nothing of it finds it, too.
    let other = builder(chain).signer(gas_key(chain).await).build().await.unwrap();
    assert_eq!(
        other.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap().transaction,
        done.transaction
    );
    assert_eq!(chain.balance(channel.config.payer).await, 90_000);
    assert_eq!(code(channels.verify_deposit(&channel.config, &deposit).await), reason::DEPOSIT_SIMULATION_FAILED);

    let more = channel.sign_deposit(chain, 5_000, soon(chain).await).await;
    let topped_up = channels.deposit(&channel.config, &channel.voucher(1), &more).await.unwrap();
    assert_eq!((topped_up.amount, topped_up.observed.state.balance), (5_000, 15_000));
}

async fn copies_of_a_deposit_at_once_share_a_transaction(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = channel(chain).await;
    let deposit = channel.sign_deposit(chain, 10_000, soon(chain).await).await;
    let voucher = channel.voucher(1);
    let copies = join_all((0..20).map(|_| channels.deposit(&channel.config, &voucher, &deposit))).await;
    let first = copies[0].as_ref().unwrap().transaction;
    assert!(copies.iter().all(|done| done.as_ref().unwrap().transaction == first), "{copies:?}");
    let sent = chain.provider().get_transaction_count(channels.senders()[0]).await.unwrap();
    assert_eq!((sent, channel.state(chain).await), (1, (10_000, 0)));
}

async fn two_processes_with_one_deposit_report_the_same_transaction(chain: &dyn Chain) {
    let (one, other) = (channels(chain).await, channels(chain).await);
    let channel = channel(chain).await;
    let deposit = channel.sign_deposit(chain, 10_000, soon(chain).await).await;
    let voucher = channel.voucher(1);
    let (one, other) = tokio::join!(
        one.deposit(&channel.config, &voucher, &deposit),
        other.deposit(&channel.config, &voucher, &deposit)
    );
    assert_eq!(one.unwrap().transaction, other.unwrap().transaction);
    assert_eq!(channel.state(chain).await, (10_000, 0));
    assert_eq!(chain.balance(channel.config.payer).await, 90_000);
}

async fn claims_and_settlements_move_what_they_say(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let relayer = chain.relayer().await;
    let (key, receiver) = (PrivateKeySigner::random(), random_address());
    let (mut rows, mut ids) = (Vec::new(), Vec::new());
    for amount in [5_300, 2_000] {
        let channel = Channel::funded(chain, receiver, &key, 100_000).await;
        channel.deposit(chain, &relayer, 10_000).await;
        rows.push(channel.row(6_000, amount).await);
        ids.push(channel.id());
    }
    let (key, token) = (AuthorizerKey::new(key), chain.asset().address);
    assert_eq!(channels.settle(receiver, token).await.unwrap(), None, "nothing was claimed yet");
    let claimed = channels.claim(&rows, &key).await.unwrap();
    assert_eq!((claimed.transactions.len(), claimed.amount, claimed.refused.len()), (1, 7_300, 0));
    let totals = claimed.observed.iter().map(|channel| (channel.state.channel_id, channel.state.total_claimed));
    assert!(totals.eq([(ids[0], 5_300), (ids[1], 2_000)]));
    assert!(chain.receipt(claimed.transactions[0]).await.status());

    let again = channels.claim(&rows, &key).await.unwrap();
    assert_eq!((again.transactions.len(), again.amount, again.observed.len()), (0, 0, 2));
    let settled = channels.settle(receiver, token).await.unwrap().expect("something was claimed");
    assert_eq!((settled.amount, chain.balance(receiver).await), (7_300, 7_300));
    assert_eq!(channels.settle(receiver, token).await.unwrap(), None::<Settled>);

    // The same through signatures that the seller made.
    rows[1].total_claimed = 6_000;
    let signature = key.sign_claims(&Channel::escrow(), &rows).await.unwrap();
    let stranger = AuthorizerKey::new(PrivateKeySigner::random()).sign_claims(&Channel::escrow(), &rows).await.unwrap();
    assert_eq!(code(channels.claim_signed(&rows, &stranger).await), reason::CLAIM_SIMULATION_FAILED);
    let signed = channels.claim_signed(&rows, &signature).await.unwrap();
    assert_eq!((signed.transactions.len(), signed.amount), (1, 4_000));
    assert!(channels.claim_signed(&rows, &signature).await.unwrap().transactions.is_empty(), "it is claimed");
    assert_eq!(code(channels.claim_signed(&[], &signature).await), reason::CLAIM_PAYLOAD);
    assert_eq!(channels.claim(&[], &key).await.unwrap().observed, []);
}

async fn bad_rows_are_left_out_wherever_they_are(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let relayer = chain.relayer().await;
    let (key, receiver) = (PrivateKeySigner::random(), random_address());
    let mut filled = Vec::new();
    for _ in 0..5 {
        let channel = Channel::funded(chain, receiver, &key, 100_000).await;
        channel.deposit(chain, &relayer, 10_000).await;
        filled.push(channel);
    }
    let stranger = Channel::funded(chain, receiver, &PrivateKeySigner::random(), 100_000).await;
    stranger.deposit(chain, &relayer, 10_000).await;
    let mut total = 0;
    for (round, bad) in [vec![0], vec![2], vec![4], vec![0, 1, 2], vec![1, 3, 4], vec![0, 1, 2, 3]].iter().enumerate() {
        total += 100;
        let mut rows = Vec::new();
        for (index, channel) in filled.iter().enumerate() {
            let mut row = channel.row(total, total).await;
            if bad.contains(&index) {
                row = match (round + index) % 4 {
                    0 => channel.row(total, total + 1).await,
                    1 => channel.row(20_000, 20_000).await,
                    2 => stranger.row(total, total).await,
                    _ => Channel { voucher_key: stranger.payer.clone(), ..channel.clone() }.row(total, total).await,
                };
            }
            rows.push(row);
        }
        let before = channels.observe(&filled.iter().map(Channel::id).collect::<Vec<_>>()).await.unwrap();
        let claimed = channels.claim(&rows, &AuthorizerKey::new(key.clone())).await.unwrap();
        let refused: Vec<usize> = claimed.refused.iter().map(|refused| refused.index).collect();
        assert_eq!(&refused, bad, "{:?}", claimed.refused);
        assert_eq!((claimed.transactions.len(), claimed.observed.len()), (1, 5 - bad.len()));
        let open = (0..5).filter(|index| !bad.contains(index)).map(|index| total - before[index].state.total_claimed);
        assert_eq!(claimed.amount, open.sum::<u128>());
        assert!(claimed.observed.iter().all(|after| after.state.total_claimed == total));
    }
    let details = channels.claim(&[filled[0].row(1, 10_000).await], &AuthorizerKey::new(key.clone())).await.unwrap();
    assert_eq!((details.transactions.len(), &*details.refused[0].detail), (0, "ClaimExceedsCeiling"));
    assert_eq!(details.refused[0].channel, filled[0].id());
}

async fn the_authorizer_itself_claims_without_a_signature(chain: &dyn Chain) {
    let by_anybody = channels(chain).await;
    let relayer = chain.relayer().await;
    let key = gas_key(chain).await;
    let by_itself = builder(chain).signer(key.clone()).build().await.unwrap();
    let channel = Channel::funded(chain, random_address(), &key, 100_000).await;
    channel.deposit(chain, &relayer, 10_000).await;
    for (channels, amount, selector) in
        [(by_itself, 1_000, claimCall::SELECTOR), (by_anybody, 2_000, claimWithSignatureCall::SELECTOR)]
    {
        let rows = [channel.row(amount, amount).await];
        let claimed = channels.claim(&rows, &AuthorizerKey::new(key.clone())).await.unwrap();
        let sent = chain.provider().raw_request("eth_getTransactionByHash".into(), [claimed.transactions[0]]);
        let sent: serde_json::Value = sent.await.unwrap();
        assert!(sent["input"].as_str().unwrap().starts_with(&hex::encode_prefixed(selector)));
    }
    assert_eq!(channel.state(chain).await, (10_000, 2_000));
}

async fn a_refund_claims_first_and_is_found_again(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = channel(chain).await;
    channel.deposit(chain, &chain.relayer().await, 10_000).await;
    let order = order(&channel, 50_000, 0, Some(channel.row(5_300, 5_300).await));
    let done = channels.refund(&order, &authorizer(&channel)).await.unwrap();
    assert_eq!(done.amount, 4_700, "what is left after the claim");
    let after = done.observed.state;
    assert_eq!((after.balance, after.total_claimed, after.refund_nonce), (5_300, 5_300, 1));
    assert_eq!(chain.balance(channel.config.payer).await, 94_700);

    let again = channels.refund(&order, &authorizer(&channel)).await.unwrap();
    assert_eq!((again.transaction, again.amount), (done.transaction, 4_700));
    assert_eq!(chain.balance(channel.config.payer).await, 94_700, "once");
    let next = super::order(&channel, 1, 1, None);
    assert_eq!(code(channels.refund(&next, &authorizer(&channel)).await), reason::REFUND_NO_BALANCE);
}

async fn a_refund_without_a_claim_is_found_again(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let key = authorizer(&channel);
    let first = channels.refund(&order(&channel, 1_000, 0, None), &key).await.unwrap();
    let second = channels.refund(&order(&channel, 1_000, 1, None), &key).await.unwrap();
    assert_ne!(first.transaction, second.transaction);
    assert_eq!((second.amount, second.observed.state.balance), (1_000, 8_000));
    // Each order finds its own transaction, although the amounts are equal.
    for (nonce, done) in [(0, first), (1, second)] {
        assert_eq!(
            channels.refund(&order(&channel, 1_000, nonce, None), &key).await.unwrap().transaction,
            done.transaction
        );
    }
    // The nonce was used, but not by this order.
    let other = channels.refund(&order(&channel, 999, 1, None), &key).await;
    assert!(matches!(other, Err(ChannelError::Unavailable(_))), "{other:?}");
    assert!(send(chain, &relayer, &refund_call(&channel, 500, 2)).await.status());
    assert_eq!(channels.refund(&order(&channel, 500, 2, None), &key).await.unwrap().amount, 500);
    assert_eq!(channel.state(chain).await, (7_500, 0));
}

async fn a_refund_shrinks_a_pending_withdrawal(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = channel(chain).await;
    channel.deposit(chain, &chain.relayer().await, 10_000).await;
    chain.fund(channel.config.payer, U256::from(10).pow(U256::from(20))).await;
    let by_payer = Relayer::of(&chain.rpc_url(), channel.payer.clone());
    let initiate = escrow::initiateWithdrawCall { config: (&channel.config).into(), amount: 6_000 };
    assert!(send(chain, &by_payer, &initiate).await.status());
    let key = authorizer(&channel);
    let some = channels.refund(&order(&channel, 1_000, 0, None), &key).await.unwrap();
    assert_eq!((some.observed.withdrawal, some.observed.state.withdraw_requested_at != 0), (5_000, true));
    let rest = channels.refund(&order(&channel, 5_000, 1, None), &key).await.unwrap();
    assert_eq!((rest.observed.withdrawal, rest.observed.state.withdraw_requested_at), (0, 0));
    assert_eq!(rest.observed.state.balance, 4_000);
}

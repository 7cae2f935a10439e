//! The double of the escrow contract: what it accepts and refuses, in the documented order, and what payments through it cost. On the
//! devnet, and on anvil with Circle's token.

use std::slice;

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::TransactionRequest;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolError, SolInterface as _};
use support::{
    authorization::random_address,
    chain::{Chain, Relayer, call, on_every_chain},
    escrow::{Channel, claim_call, install, refund_call, send},
};
use tower_x402::vouchers::{
    ChannelConfig, ClaimEntry, Deposit, DepositAuthorization, Escrow,
    abi::BatchSettlement::{self as escrow, BatchSettlementErrors},
};

on_every_chain! {
    digests_are_those_of_the_contract,
    a_deposit_claim_settlement_and_refund_move_exactly_what_they_say,
    a_deposit_that_the_contract_cannot_book_is_refused,
    an_authorization_fills_only_the_channel_that_it_names,
    a_claim_that_the_payer_did_not_sign_is_refused,
    a_claim_sent_twice_pays_once,
    one_bad_row_reverts_the_whole_batch,
    a_withdrawal_waits_for_its_delay_and_takes_only_what_is_left,
    a_refund_shrinks_a_pending_withdrawal,
    a_refund_is_signed_for_one_nonce,
    claim_and_refund_fit_into_one_transaction,
    payments_by_voucher_cost_a_fraction_of_a_transfer,
}

/// The error with which a call by `from` reverts.
async fn revert(chain: &dyn Chain, from: Address, call: &impl SolCall) -> Bytes {
    let request = TransactionRequest::default().from(from).to(Escrow::ADDRESS).input(call.abi_encode().into());
    let error = chain.provider().call(request).await.expect_err("the call reverts");
    error.as_error_resp().and_then(|response| response.as_revert_data()).expect("a revert carries its error")
}

#[track_caller]
fn assert_is<E: SolError>(data: &Bytes) {
    let found = BatchSettlementErrors::abi_decode(data);
    assert!(data.starts_with(&E::SELECTOR), "expected {}, found {found:?}", E::SIGNATURE);
}

async fn channel(chain: &dyn Chain) -> Channel {
    install(chain).await;
    Channel::funded(chain, random_address(), &PrivateKeySigner::random(), 100_000).await
}

async fn digests_are_those_of_the_contract(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let (ours, id) = (Channel::escrow(), channel.id());
    let provider = chain.provider();
    let asked = escrow::getChannelIdCall { config: (&channel.config).into() };
    assert_eq!(call(provider, Escrow::ADDRESS, asked).await.unwrap(), id.digest());
    let asked = escrow::getVoucherDigestCall { channelId: id.digest(), maxClaimableAmount: 2_000 };
    assert_eq!(call(provider, Escrow::ADDRESS, asked).await.unwrap(), ours.voucher_digest(id, 2_000));
    let asked = escrow::getRefundDigestCall { channelId: id.digest(), nonce: U256::from(3), amount: 4_700 };
    assert_eq!(call(provider, Escrow::ADDRESS, asked).await.unwrap(), ours.refund_digest(id, U256::from(3), 4_700));
    let rows = [channel.row(5_300, 4_300).await, channel.row(6_000, 6_000).await];
    let entries = rows.clone().map(|row| ClaimEntry {
        channel: id,
        max_claimable_amount: row.voucher.max_claimable_amount,
        total_claimed: row.total_claimed,
    });
    let asked = escrow::getClaimBatchDigestCall { voucherClaims: rows.iter().map(Into::into).collect() };
    assert_eq!(call(provider, Escrow::ADDRESS, asked).await.unwrap(), ours.claim_batch_digest(&entries));
}

async fn a_deposit_claim_settlement_and_refund_move_exactly_what_they_say(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    let receipt = channel.deposit(chain, &relayer, 10_000).await;
    let deposited = receipt.logs().iter().find_map(|log| log.log_decode::<escrow::Deposited>().ok()).unwrap();
    assert_eq!((deposited.inner.amount, deposited.inner.newBalance), (10_000, 10_000));
    assert_eq!(channel.state(chain).await, (10_000, 0));

    let rows = [channel.row(6_000, 5_300).await];
    let receipt = send(chain, &relayer, &claim_call(&rows, &channel.authorizer)).await;
    let claimed = receipt.logs().iter().find_map(|log| log.log_decode::<escrow::Claimed>().ok()).unwrap();
    assert_eq!((claimed.inner.claimAmount, claimed.inner.newTotalClaimed), (5_300, 5_300));
    assert_eq!(channel.state(chain).await, (10_000, 5_300), "a claim does not lower the balance");
    let receiver = channel.config.receiver;
    assert_eq!(chain.balance(receiver).await, 0, "claimed is not transferred yet");

    let settle = escrow::settleCall { receiver, token: chain.asset().address };
    assert!(send(chain, &relayer, &settle).await.status());
    assert_eq!(chain.balance(receiver).await, 5_300);
    let again = send(chain, &relayer, &settle).await;
    assert!(again.status() && again.logs().is_empty(), "nothing is left, and that is no error");

    assert!(send(chain, &relayer, &refund_call(&channel, 10_000, 0)).await.status());
    assert_eq!(channel.state(chain).await, (5_300, 5_300), "no more than was left");
    assert_eq!(chain.balance(channel.config.payer).await, 100_000 - 5_300);
    assert_eq!(chain.balance(Escrow::ADDRESS).await, 0);
}

async fn a_deposit_that_the_contract_cannot_book_is_refused(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let from = random_address();
    let deposit = channel.sign_deposit(chain, 10_000, chain.timestamp().await + 3_600).await;
    let good = channel.deposit_call(&deposit);
    for config in [
        ChannelConfig { receiver: Address::ZERO, ..channel.config },
        ChannelConfig { receiver_authorizer: Address::ZERO, ..channel.config },
        ChannelConfig { token: Address::ZERO, ..channel.config },
        ChannelConfig { payer: Address::ZERO, ..channel.config },
    ] {
        let call = escrow::depositCall { config: (&config).into(), ..good.clone() };
        assert_is::<escrow::InvalidChannel>(&revert(chain, from, &call).await);
    }
    for withdraw_delay in [899, 2_592_001] {
        let config = ChannelConfig { withdraw_delay, ..channel.config };
        let call = escrow::depositCall { config: (&config).into(), ..good.clone() };
        assert_is::<escrow::WithdrawDelayOutOfRange>(&revert(chain, from, &call).await);
    }
    let nothing = escrow::depositCall { amount: 0, ..good.clone() };
    assert_is::<escrow::ZeroDeposit>(&revert(chain, from, &nothing).await);
    let no_collector = escrow::depositCall { collector: Address::ZERO, ..good.clone() };
    assert_is::<escrow::InvalidCollector>(&revert(chain, from, &no_collector).await);
}

async fn an_authorization_fills_only_the_channel_that_it_names(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    let deposit = channel.sign_deposit(chain, 10_000, chain.timestamp().await + 3_600).await;
    let other = ChannelConfig { salt: B256::repeat_byte(1), ..channel.config };
    let elsewhere = escrow::depositCall { config: (&other).into(), ..channel.deposit_call(&deposit) };
    assert!(!send(chain, &relayer, &elsewhere).await.status(), "another channel of the same payer");
    let more = Deposit { amount: 10_001, ..deposit.clone() };
    assert!(!send(chain, &relayer, &channel.deposit_call(&more)).await.status(), "another amount");
    let DepositAuthorization::Erc3009 { valid_after, valid_before, signature, .. } = deposit.authorization.clone()
    else {
        unreachable!("signed above")
    };
    let salt = B256::repeat_byte(2);
    let authorization = DepositAuthorization::Erc3009 { valid_after, valid_before, salt, signature };
    let resalted = Deposit { authorization, ..deposit.clone() };
    assert!(!send(chain, &relayer, &channel.deposit_call(&resalted)).await.status(), "another nonce");

    assert!(send(chain, &relayer, &channel.deposit_call(&deposit)).await.status());
    assert!(!send(chain, &relayer, &channel.deposit_call(&deposit)).await.status(), "it is used");
    assert_eq!(channel.state(chain).await, (10_000, 0));
}

async fn a_claim_that_the_payer_did_not_sign_is_refused(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let claim = |rows: &[_]| escrow::claimCall { voucherClaims: rows.iter().map(Into::into).collect() };
    let authorizer = channel.authorizer.address();

    assert_is::<escrow::EmptyBatch>(&revert(chain, authorizer, &claim(&[])).await);
    let good = channel.row(2_000, 2_000).await;
    assert_is::<escrow::NotAuthorizedToClaim>(
        &revert(chain, channel.config.payer, &claim(slice::from_ref(&good))).await,
    );
    let above = channel.row(2_000, 2_001).await;
    assert_is::<escrow::ClaimExceedsCeiling>(&revert(chain, authorizer, &claim(&[above])).await);
    let beyond = channel.row(10_001, 10_001).await;
    assert_is::<escrow::ClaimExceedsBalance>(&revert(chain, authorizer, &claim(&[beyond])).await);
    let mut raised = good.clone();
    raised.voucher.max_claimable_amount = 2_001;
    assert_is::<escrow::InvalidSignature>(&revert(chain, authorizer, &claim(&[raised])).await);
    let by_payer = Channel { voucher_key: channel.payer.clone(), ..channel.clone() };
    let row = by_payer.row(2_000, 2_000).await;
    assert_is::<escrow::InvalidSignature>(&revert(chain, authorizer, &claim(&[row])).await);
    let stranger = claim_call(slice::from_ref(&good), &PrivateKeySigner::random());
    assert_is::<escrow::InvalidSignature>(&revert(chain, random_address(), &stranger).await);

    assert!(send(chain, &relayer, &claim_call(&[good], &channel.authorizer)).await.status());
    assert_eq!(channel.state(chain).await, (10_000, 2_000));
}

async fn a_claim_sent_twice_pays_once(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let newest = channel.row(3_000, 2_500).await;
    assert!(send(chain, &relayer, &claim_call(slice::from_ref(&newest), &channel.authorizer)).await.status());
    for row in [newest, channel.row(3_000, 2_499).await, channel.row(1, 1).await] {
        let receipt = send(chain, &relayer, &claim_call(&[row], &channel.authorizer)).await;
        assert!(receipt.status() && receipt.logs().is_empty(), "nothing new, no error, no event");
    }
    assert_eq!(channel.state(chain).await, (10_000, 2_500));
}

async fn one_bad_row_reverts_the_whole_batch(chain: &dyn Chain) {
    install(chain).await;
    let (authorizer, receiver, relayer) = (PrivateKeySigner::random(), random_address(), chain.relayer().await);
    let mut channels = Vec::new();
    for _ in 0..3 {
        let channel = Channel::funded(chain, receiver, &authorizer, 100_000).await;
        channel.deposit(chain, &relayer, 10_000).await;
        channels.push(channel);
    }
    let mut rows = vec![channels[0].row(1_000, 1_000).await, channels[1].row(20_000, 20_000).await];
    let refused = revert(chain, random_address(), &claim_call(&rows, &authorizer)).await;
    assert_is::<escrow::ClaimExceedsBalance>(&refused);
    rows[1] = channels[2].row(3_000, 2_000).await;
    assert!(send(chain, &relayer, &claim_call(&rows, &authorizer)).await.status());
    let asked = escrow::receiversCall { receiver, token: chain.asset().address };
    let owed = call(chain.provider(), Escrow::ADDRESS, asked).await.unwrap();
    assert_eq!((owed.totalClaimed, owed.totalSettled), (3_000, 0));
    let other = Channel::funded(chain, receiver, &PrivateKeySigner::random(), 100_000).await;
    let mixed = [channels[0].row(1_500, 1_500).await, other.row(1, 1).await];
    assert_is::<escrow::NotReceiverAuthorizer>(
        &revert(chain, random_address(), &claim_call(&mixed, &authorizer)).await,
    );
}

async fn a_withdrawal_waits_for_its_delay_and_takes_only_what_is_left(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let (payer, config) = (channel.config.payer, (&channel.config).into());
    let initiate = |amount| escrow::initiateWithdrawCall { config: (&channel.config).into(), amount };
    let finalize = escrow::finalizeWithdrawCall { config };
    assert_is::<escrow::InvalidChannel>(&revert(chain, random_address(), &initiate(1)).await);
    assert_is::<escrow::NothingToWithdraw>(&revert(chain, payer, &initiate(0)).await);
    assert_is::<escrow::WithdrawAmountExceedsAvailable>(&revert(chain, payer, &initiate(10_001)).await);
    assert_is::<escrow::WithdrawalNotPending>(&revert(chain, payer, &finalize).await);

    chain.fund(payer, U256::from(10).pow(U256::from(20))).await;
    let by_payer = Relayer::of(&chain.rpc_url(), channel.payer.clone());
    assert!(send(chain, &by_payer, &initiate(10_000)).await.status());
    assert_is::<escrow::WithdrawalAlreadyPending>(&revert(chain, payer, &initiate(1)).await);
    assert_is::<escrow::WithdrawDelayNotElapsed>(&revert(chain, payer, &finalize).await);
    // What was not claimed when the payer announced it can be claimed until the payer takes it.
    let rows = [channel.row(4_000, 4_000).await];
    assert!(send(chain, &relayer, &claim_call(&rows, &channel.authorizer)).await.status());
    chain.set_next_timestamp(chain.timestamp().await + 901).await;
    chain.mine().await;
    assert_is::<escrow::NotAuthorizedToFinalizeWithdraw>(&revert(chain, random_address(), &finalize).await);
    assert!(send(chain, &by_payer, &finalize).await.status());
    assert_eq!(channel.state(chain).await, (4_000, 4_000));
    assert_eq!(chain.balance(payer).await, 96_000);
}

async fn a_refund_shrinks_a_pending_withdrawal(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    chain.fund(channel.config.payer, U256::from(10).pow(U256::from(20))).await;
    let by_payer = Relayer::of(&chain.rpc_url(), channel.payer.clone());
    let initiate = escrow::initiateWithdrawCall { config: (&channel.config).into(), amount: 6_000 };
    assert!(send(chain, &by_payer, &initiate).await.status());
    let pending = async || {
        let asked = escrow::pendingWithdrawalsCall { channelId: channel.id().digest() };
        let pending = call(chain.provider(), Escrow::ADDRESS, asked).await.unwrap();
        (pending.amount, pending.initiatedAt.is_zero())
    };
    assert_eq!(pending().await, (6_000, false));
    assert!(send(chain, &relayer, &refund_call(&channel, 1_000, 0)).await.status());
    assert_eq!(pending().await, (5_000, false));
    assert!(send(chain, &relayer, &refund_call(&channel, 5_000, 1)).await.status());
    assert_eq!(pending().await, (0, true));
    assert_eq!(channel.state(chain).await, (4_000, 0));
}

async fn a_refund_is_signed_for_one_nonce(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let from = random_address();
    assert_is::<escrow::InvalidRefundNonce>(&revert(chain, from, &refund_call(&channel, 1, 1)).await);
    assert_is::<escrow::ZeroRefund>(&revert(chain, from, &refund_call(&channel, 0, 0)).await);
    let more = escrow::refundWithSignatureCall { amount: 2, ..refund_call(&channel, 1, 0) };
    assert_is::<escrow::InvalidSignature>(&revert(chain, from, &more).await);
    let by_payer = escrow::refundCall { config: (&channel.config).into(), amount: 1 };
    assert_is::<escrow::NotAuthorizedToRefund>(&revert(chain, channel.config.payer, &by_payer).await);
    assert!(send(chain, &relayer, &refund_call(&channel, 1, 0)).await.status());
    assert_is::<escrow::InvalidRefundNonce>(&revert(chain, from, &refund_call(&channel, 1, 0)).await);
    assert_eq!(channel.state(chain).await, (9_999, 0));
}

async fn claim_and_refund_fit_into_one_transaction(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let rows = [channel.row(5_300, 5_300).await];
    let data = vec![
        claim_call(&rows, &channel.authorizer).abi_encode().into(),
        refund_call(&channel, 4_700, 0).abi_encode().into(),
    ];
    assert!(send(chain, &relayer, &escrow::multicallCall { data }).await.status());
    assert_eq!(channel.state(chain).await, (5_300, 5_300));
    let data = vec![refund_call(&channel, 1, 7).abi_encode().into()];
    let refused = revert(chain, random_address(), &escrow::multicallCall { data }).await;
    assert_is::<escrow::InvalidRefundNonce>(&refused);
}

/// A thousand payments of ten payers: what the chain charges for all deposits, one claim and one settlement.
async fn payments_by_voucher_cost_a_fraction_of_a_transfer(chain: &dyn Chain) {
    const PAYERS: usize = 10;
    const PAYMENTS: u64 = 1_000;
    const PRICE: u128 = 1_000;
    install(chain).await;
    let (authorizer, receiver, relayer) = (PrivateKeySigner::random(), random_address(), chain.relayer().await);
    let (mut gas, mut rows) = (0, Vec::new());
    let paid = PRICE * u128::from(PAYMENTS) / PAYERS as u128;
    for _ in 0..PAYERS {
        let channel = Channel::funded(chain, receiver, &authorizer, 1_000_000).await;
        gas += channel.deposit(chain, &relayer, paid).await.gas_used;
        rows.push(channel.row(paid, paid).await);
    }
    gas += send(chain, &relayer, &claim_call(&rows, &authorizer)).await.gas_used;
    gas += send(chain, &relayer, &escrow::settleCall { receiver, token: chain.asset().address }).await.gas_used;
    assert_eq!(u128::from(chain.balance(receiver).await), PRICE * u128::from(PAYMENTS));
    println!("{PAYMENTS} payments of {PAYERS} payers by voucher: {} gas each", gas / PAYMENTS);
    assert!(gas / PAYMENTS <= 1_800, "{gas} gas for {PAYMENTS} payments");
}

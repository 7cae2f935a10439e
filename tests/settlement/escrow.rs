//! The rules of the escrow contract of payment channels, one test each, and what payments through it cost. `docs/peers.md` lists them.
//!
//! They are held against this repository's double of the contract, on the devnet and on anvil with Circle's token. To hold the official
//! contract to them, put its runtime code (`eth_getCode`, in hex) into a file and name that in `TOWER_X402_ESCROW_CODE`.

use std::slice;

use alloy_primitives::{Address, B256, Bytes, U256, hex, keccak256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::{TransactionReceipt, TransactionRequest};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolError, SolEvent, SolInterface as _};
use support::{
    authorization::random_address,
    chain::{Chain, Relayer, call, on_every_chain},
    escrow::{Channel, claim_call, install, refund_call, send},
};
use tower_x402::vouchers::{
    ChannelConfig, Claim, ClaimEntry, Deposit, DepositAuthorization, Escrow,
    abi::{
        self as escrow_abi,
        BatchSettlement::{self as escrow, BatchSettlementErrors},
    },
};

on_every_chain! {
    digests_are_those_of_the_typed_data,
    constants_and_domain_are_those_of_the_deployed_contract,
    deposit_needs_four_addresses_a_delay_an_amount_and_a_collector_in_this_order,
    deposit_of_more_than_128_bits_in_all_reverts,
    deposit_that_its_collector_does_not_deliver_exactly_reverts,
    deposit_is_made_by_anybody_through_any_collector,
    channel_is_created_when_new_and_again_when_empty_and_never_claimed,
    collector_serves_the_escrow_contract_alone,
    authorization_fills_only_the_channel_that_it_names_and_once,
    deposit_claim_settlement_and_refund_move_exactly_what_they_say,
    claim_is_made_by_the_receiver_or_its_authorizer,
    signed_claim_is_made_by_anybody_for_one_authorizer,
    row_is_checked_for_ceiling_then_balance_then_signature,
    row_that_claims_nothing_new_is_skipped_before_its_signature_is_checked,
    one_bad_row_reverts_the_whole_batch,
    payer_authorizer_signs_by_its_key_whatever_code_it_has,
    payer_without_authorizer_signs_by_its_key_or_else_by_its_code,
    receiver_authorizer_signs_by_its_key_or_else_by_its_code,
    signature_has_65_bytes_a_low_s_and_a_v_of_27_or_28,
    voucher_stays_valid_after_a_refund_and_another_deposit,
    withdrawal_is_announced_and_made_by_the_payer_or_its_authorizer,
    withdrawal_waits_for_its_delay_and_takes_only_what_is_left,
    withdrawal_of_what_was_claimed_since_takes_nothing_and_ends,
    withdrawal_that_ends_first_leaves_a_signed_refund_whole,
    refund_shrinks_a_pending_withdrawal,
    signed_refund_is_for_one_nonce,
    refund_by_the_receiver_uses_up_the_nonce_of_a_signed_one,
    refund_of_an_empty_channel_moves_only_the_nonce,
    transfer_that_the_token_refuses_reverts_settlement_and_refund_and_no_claim,
    calls_of_one_transaction_keep_their_sender_and_revert_together,
    collector_calls_back_in_vain,
    no_call_takes_ether,
    payments_by_voucher_cost_a_fraction_of_a_transfer,
}

/// A token and a collector in one, which books every deposit without a transfer: any call but `balanceOf` adds the third word of its
/// arguments to the only balance there is.
const BOOK: [u8; 47] = hex!(
    "600035" "60e01c" "6370a08231" "14" "6023" "57" "604435" "600054" "01" "600055" "600160005260206000f3"
    "5b" "60005460005260206000f3"
);
/// A collector that calls its caller with the data of the deposit, and reverts if that call does.
const CALLER: [u8; 36] = hex!(
    "60a435" "80" "60c4" "6000" "37" "6000" "6000" "82" "6000" "6000" "33" "5a" "f1" "6022" "57" "3d" "6000" "6000" "3e" "3d" "6000"
    "fd" "5b" "00"
);
/// Code that does nothing.
const NOTHING: [u8; 1] = hex!("00");

/// The error with which a call by `from` reverts.
async fn revert(chain: &dyn Chain, from: Address, call: &impl SolCall) -> Bytes {
    let request = TransactionRequest::default().from(from).to(Escrow::ADDRESS).input(call.abi_encode().into());
    let error = chain.provider().call(request).await.expect_err("the call reverts");
    error.as_error_resp().and_then(|response| response.as_revert_data()).expect("a revert carries its error")
}

/// A channel in which anything can be deposited.
async fn booked(chain: &dyn Chain) -> Channel {
    let mut channel = channel(chain).await;
    channel.config.token = random_address();
    chain.set_code(channel.config.token, Bytes::from_static(&BOOK)).await;
    channel
}

/// A deposit that only the book has.
fn booking(channel: &Channel, amount: u128) -> escrow::depositCall {
    let config = (&channel.config).into();
    escrow::depositCall { config, amount, collector: channel.config.token, collectorData: Bytes::new() }
}

/// The same, made.
async fn book(chain: &dyn Chain, channel: &Channel, amount: u128) -> TransactionReceipt {
    let receipt = send(chain, &chain.relayer().await, &booking(channel, amount)).await;
    assert!(receipt.status(), "the deposit reverted");
    receipt
}

/// The account of this key, with ether.
async fn account(chain: &dyn Chain, key: &PrivateKeySigner) -> Relayer {
    chain.fund(key.address(), U256::from(10).pow(U256::from(20))).await;
    Relayer::of(&chain.rpc_url(), key.clone())
}

fn claim(rows: &[Claim]) -> escrow::claimCall {
    escrow::claimCall { voucherClaims: rows.iter().map(Into::into).collect() }
}

/// The claim of a row with another signature.
fn claim_by(row: &Claim, signature: Vec<u8>) -> escrow::claimCall {
    let row = escrow_abi::VoucherClaim { signature: signature.into(), ..row.into() };
    escrow::claimCall { voucherClaims: vec![row] }
}

async fn refund_nonce(chain: &dyn Chain, channel: &Channel) -> U256 {
    let asked = escrow::refundNonceCall { channelId: channel.id().digest() };
    call(chain.provider(), Escrow::ADDRESS, asked).await.unwrap()
}

fn events<E: SolEvent>(receipt: &TransactionReceipt) -> usize {
    receipt.logs().iter().filter(|log| log.topic0() == Some(&E::SIGNATURE_HASH)).count()
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

async fn digests_are_those_of_the_typed_data(chain: &dyn Chain) {
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

async fn constants_and_domain_are_those_of_the_deployed_contract(chain: &dyn Chain) {
    install(chain).await;
    let ask = async |signature: &str| {
        let input = keccak256(signature)[..4].to_vec();
        let request = TransactionRequest::default().to(Escrow::ADDRESS).input(Bytes::from(input).into());
        chain.provider().call(request).await.unwrap_or_else(|error| panic!("{signature}: {error}"))
    };
    for (constant, seconds) in [("MIN_WITHDRAW_DELAY()", 900_u64), ("MAX_WITHDRAW_DELAY()", 2_592_000)] {
        assert_eq!(U256::from_be_slice(&ask(constant).await), U256::from(seconds), "{constant}");
    }
    for (constant, hash) in [
        ("CHANNEL_CONFIG_TYPEHASH()", "0x1c9a06ceab9b0ebbd3301dc56c9111bb6d9af421356dc9ccb3b7084c755db308"),
        ("VOUCHER_TYPEHASH()", "0x1e1bd6ff84c3e0d9029a292b212e039c0ca97ec497c55191a4a5874294609a69"),
        ("REFUND_TYPEHASH()", "0xbe23ad087435072cd69b49cc5b92de10ee610fce7ae0ab428307972d764bb216"),
        ("CLAIM_ENTRY_TYPEHASH()", "0x30b9a0367528fca13c3e8ec6134c3113f1887ebe7a1ad61de0955aac288b0cf5"),
        ("CLAIM_BATCH_TYPEHASH()", "0x42bd57c010b870c2e96203c66341f28a6a19b4d56a74533a8eb5f706b9fd6d57"),
    ] {
        assert_eq!(ask(constant).await.to_string(), hash, "{constant}");
    }
    let domain = ask("eip712Domain()").await;
    let word = |place: usize| U256::from_be_slice(&domain[32 * place..32 * (place + 1)]);
    assert_eq!(domain[0], 0x0f, "name, version, chain and contract");
    assert_eq!(word(3), U256::from(chain.asset().network.chain_id()));
    assert_eq!(Address::from_word(word(4).into()), Escrow::ADDRESS);
    assert!([&b"x402 Batch Settlement"[..], b"1"].iter().all(|part| domain.windows(part.len()).any(|it| it == *part)));
    for (event, topic) in [
        (escrow::ChannelCreated::SIGNATURE_HASH, "69d8248d5566bdb2ebc4d218970710d8378a2ff9b709a999e052b71970f808fa"),
        (escrow::ChannelClosed::SIGNATURE_HASH, "8d5942f197f362dfd44dfdc1b0b7a9721c9151b67f55817c83349271d3c08d37"),
        (escrow::Deposited::SIGNATURE_HASH, "6c2a09353b5e75e70d0b9778b80a413809bb235d46c211811c474b3346791d89"),
        (escrow::Claimed::SIGNATURE_HASH, "36bd546bb573e8921fdbfd934bbed62d872796b01792cd240cce27f79dd3eddd"),
        (escrow::Settled::SIGNATURE_HASH, "7337b4386b690fdb8ba66905b92b9d45d33bc6626ee2620c905fb150ec0cc47d"),
        (escrow::Refunded::SIGNATURE_HASH, "a84286cf8ebc7903a663c77c8d99aa92b600d4c2fcca872a5d4a663db4eb394b"),
        (escrow::WithdrawInitiated::SIGNATURE_HASH, "e4280d0d903c7f258f62b07c62f262377cbaa23f7791d78126e6446e0f0e3c23"),
        (escrow::WithdrawFinalized::SIGNATURE_HASH, "546ce1e2242cd930c196bd08b894443562d709b4fffe4f028a75a6d233efc6e3"),
    ] {
        assert_eq!(hex::encode(event), topic);
    }
}

async fn deposit_claim_settlement_and_refund_move_exactly_what_they_say(chain: &dyn Chain) {
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

async fn deposit_needs_four_addresses_a_delay_an_amount_and_a_collector_in_this_order(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let from = random_address();
    // Nothing of it is right but what the checks before have passed.
    let bad = ChannelConfig { withdraw_delay: 899, ..channel.config };
    let nothing = |config: &ChannelConfig| escrow::depositCall {
        config: config.into(),
        amount: 0,
        collector: Address::ZERO,
        collectorData: Bytes::new(),
    };
    for config in [
        ChannelConfig { receiver: Address::ZERO, ..bad },
        ChannelConfig { receiver_authorizer: Address::ZERO, ..bad },
        ChannelConfig { token: Address::ZERO, ..bad },
        ChannelConfig { payer: Address::ZERO, ..bad },
    ] {
        assert_is::<escrow::InvalidChannel>(&revert(chain, from, &nothing(&config)).await);
    }
    for withdraw_delay in [0, 899, 2_592_001] {
        let call = nothing(&ChannelConfig { withdraw_delay, ..channel.config });
        assert_is::<escrow::WithdrawDelayOutOfRange>(&revert(chain, from, &call).await);
    }
    for withdraw_delay in [900, 2_592_000] {
        let call = nothing(&ChannelConfig { withdraw_delay, payer_authorizer: Address::ZERO, ..channel.config });
        assert_is::<escrow::ZeroDeposit>(&revert(chain, from, &call).await);
    }
    let no_collector = escrow::depositCall { collector: Address::ZERO, ..booking(&channel, 1) };
    assert_is::<escrow::InvalidCollector>(&revert(chain, from, &no_collector).await);
}

async fn deposit_of_more_than_128_bits_in_all_reverts(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, u128::MAX - 1).await;
    assert_is::<escrow::DepositOverflow>(&revert(chain, random_address(), &booking(&channel, 2)).await);
    book(chain, &channel, 1).await;
    assert_eq!(channel.state(chain).await, (u128::MAX, 0));
}

async fn deposit_that_its_collector_does_not_deliver_exactly_reverts(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let idle = random_address();
    chain.set_code(idle, Bytes::from_static(&NOTHING)).await;
    // The book of another token books nothing of this one.
    let other = booked(chain).await.config.token;
    for collector in [idle, other] {
        let call = escrow::depositCall { collector, ..booking(&channel, 5) };
        assert_is::<escrow::DepositCollectionFailed>(&revert(chain, random_address(), &call).await);
    }
}

async fn deposit_is_made_by_anybody_through_any_collector(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let receipt = book(chain, &channel, 5).await;
    let deposited = receipt.logs().iter().find_map(|log| log.log_decode::<escrow::Deposited>().ok()).unwrap();
    assert_eq!((deposited.inner.sender, deposited.inner.newBalance), (receipt.from, 5));
}

async fn channel_is_created_when_new_and_again_when_empty_and_never_claimed(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let relayer = chain.relayer().await;
    let created = async |amount| events::<escrow::ChannelCreated>(&book(chain, &channel, amount).await);
    assert_eq!((created(10).await, created(10).await), (1, 0));
    let closed = send(chain, &relayer, &refund_call(&channel, 20, 0)).await;
    assert_eq!(events::<escrow::ChannelClosed>(&closed), 1);
    assert_eq!(created(10).await, 1);
    assert!(send(chain, &relayer, &claim_call(&[channel.row(4, 4).await], &channel.authorizer)).await.status());
    let emptied = send(chain, &relayer, &refund_call(&channel, 20, 1)).await;
    assert_eq!((channel.state(chain).await, events::<escrow::ChannelClosed>(&emptied)), ((4, 4), 0));
    assert_eq!(created(10).await, 0);
}

async fn collector_serves_the_escrow_contract_alone(chain: &dyn Chain) {
    alloy_sol_types::sol! {
        function collect(address payer, address token, uint256 amount, bytes32 channelId, bytes data);
        error OnlyX402BatchSettlement();
    }
    let channel = channel(chain).await;
    let deposit = channel.sign_deposit(chain, 10_000, chain.timestamp().await + 3_600).await;
    let call = collectCall {
        payer: channel.config.payer,
        token: channel.config.token,
        amount: U256::from(10_000),
        channelId: channel.id().digest(),
        data: deposit.collector_data(),
    };
    let revert = async |from| {
        let request = TransactionRequest::default().from(from).to(Escrow::ERC3009_COLLECTOR);
        let error = chain.provider().call(request.input(call.abi_encode().into())).await.expect_err("it reverts");
        error.as_error_resp().and_then(|response| response.as_revert_data()).unwrap()
    };
    for from in [random_address(), channel.config.payer, channel.config.receiver] {
        assert!(revert(from).await.starts_with(&OnlyX402BatchSettlement::SELECTOR));
    }
}

async fn authorization_fills_only_the_channel_that_it_names_and_once(chain: &dyn Chain) {
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

async fn claim_is_made_by_the_receiver_or_its_authorizer(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, 10_000).await;
    let (receiver, authorizer) = (channel.config.receiver, channel.authorizer.address());
    assert_is::<escrow::EmptyBatch>(&revert(chain, authorizer, &claim(&[])).await);
    let row = [channel.row(2_000, 2_000).await];
    for stranger in [channel.config.payer, channel.config.payer_authorizer, random_address()] {
        assert_is::<escrow::NotAuthorizedToClaim>(&revert(chain, stranger, &claim(&row)).await);
    }
    for from in [receiver, authorizer] {
        let request = TransactionRequest::default().from(from).to(Escrow::ADDRESS);
        chain.provider().call(request.input(claim(&row).abi_encode().into())).await.expect("it may claim");
    }
}

async fn signed_claim_is_made_by_anybody_for_one_authorizer(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, 10_000).await;
    let nothing = escrow::claimWithSignatureCall { voucherClaims: vec![], authorizerSignature: Bytes::new() };
    assert_is::<escrow::EmptyBatch>(&revert(chain, random_address(), &nothing).await);
    let rows = [channel.row(2_000, 1_500).await];
    let by_stranger = claim_call(&rows, &PrivateKeySigner::random());
    assert_is::<escrow::InvalidSignature>(&revert(chain, random_address(), &by_stranger).await);
    let other_rows = claim_call(&[channel.row(2_000, 1_501).await], &channel.authorizer);
    let swapped = escrow::claimWithSignatureCall {
        authorizerSignature: other_rows.authorizerSignature,
        ..claim_call(&rows, &channel.authorizer)
    };
    assert_is::<escrow::InvalidSignature>(&revert(chain, random_address(), &swapped).await);
    let relayer = chain.relayer().await;
    let receipt = send(chain, &relayer, &claim_call(&rows, &channel.authorizer)).await;
    let claimed = receipt.logs().iter().find_map(|log| log.log_decode::<escrow::Claimed>().ok()).unwrap();
    assert_eq!((claimed.inner.sender, claimed.inner.claimAmount), (relayer.address, 1_500));
}

async fn row_is_checked_for_ceiling_then_balance_then_signature(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let authorizer = channel.authorizer.address();
    let unsigned = async |max, total| {
        let row = Channel { voucher_key: PrivateKeySigner::random(), ..channel.clone() }.row(max, total).await;
        revert(chain, authorizer, &claim(&[row])).await
    };
    assert_is::<escrow::ClaimExceedsCeiling>(&unsigned(20_000, 20_001).await);
    assert_is::<escrow::ClaimExceedsBalance>(&unsigned(20_000, 10_001).await);
    assert_is::<escrow::InvalidSignature>(&unsigned(10_000, 10_000).await);
    let mut raised = channel.row(2_000, 2_000).await;
    raised.voucher.max_claimable_amount = 2_001;
    assert_is::<escrow::InvalidSignature>(&revert(chain, authorizer, &claim(&[raised])).await);
    let good = channel.row(2_000, 2_000).await;
    assert!(send(chain, &relayer, &claim_call(&[good], &channel.authorizer)).await.status());
    assert_eq!(channel.state(chain).await, (10_000, 2_000));
}

async fn row_that_claims_nothing_new_is_skipped_before_its_signature_is_checked(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    let newest = channel.row(3_000, 2_500).await;
    assert!(send(chain, &relayer, &claim_call(slice::from_ref(&newest), &channel.authorizer)).await.status());
    let unsigned = Channel { voucher_key: PrivateKeySigner::random(), ..channel.clone() };
    for row in [newest, channel.row(3_000, 2_499).await, unsigned.row(1, 2_500).await, unsigned.row(1, 0).await] {
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

async fn payer_authorizer_signs_by_its_key_whatever_code_it_has(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, 10_000).await;
    chain.set_code(channel.config.payer_authorizer, Bytes::from_static(&NOTHING)).await;
    let authorizer = channel.authorizer.address();
    let by_payer = Channel { voucher_key: channel.payer.clone(), ..channel.clone() };
    let refused = revert(chain, authorizer, &claim(&[by_payer.row(2_000, 2_000).await])).await;
    assert_is::<escrow::InvalidSignature>(&refused);
    let call = claim_call(&[channel.row(2_000, 2_000).await], &channel.authorizer);
    assert!(send(chain, &chain.relayer().await, &call).await.status());
    // A contract cannot be one, even if it accepts the signature.
    let mut of_wallet = booked(chain).await;
    of_wallet.config.payer_authorizer = chain.deploy_wallet(of_wallet.voucher_key.address()).await;
    book(chain, &of_wallet, 10_000).await;
    let row = of_wallet.row(2_000, 2_000).await;
    assert_is::<escrow::InvalidSignature>(&revert(chain, of_wallet.authorizer.address(), &claim(&[row])).await);
}

async fn payer_without_authorizer_signs_by_its_key_or_else_by_its_code(chain: &dyn Chain) {
    let mut of_key = booked(chain).await;
    (of_key.config.payer_authorizer, of_key.voucher_key) = (Address::ZERO, of_key.payer.clone());
    let mut of_wallet = booked(chain).await;
    of_wallet.config.payer = chain.deploy_wallet(of_wallet.voucher_key.address()).await;
    of_wallet.config.payer_authorizer = Address::ZERO;
    for channel in [&of_key, &of_wallet] {
        book(chain, channel, 10_000).await;
        let authorizer = channel.authorizer.address();
        let stranger = Channel { voucher_key: PrivateKeySigner::random(), ..channel.clone() };
        let refused = revert(chain, authorizer, &claim(&[stranger.row(2_000, 2_000).await])).await;
        assert_is::<escrow::InvalidSignature>(&refused);
        let call = claim_call(&[channel.row(2_000, 2_000).await], &channel.authorizer);
        assert!(send(chain, &chain.relayer().await, &call).await.status());
    }
    // An account that delegates to code (EIP-7702) has no other signature than what the code accepts.
    let code = random_address();
    chain.set_code(code, Bytes::from_static(&NOTHING)).await;
    chain.delegate(of_key.config.payer, code).await;
    let row = of_key.row(3_000, 3_000).await;
    assert_is::<escrow::InvalidSignature>(&revert(chain, of_key.authorizer.address(), &claim(&[row])).await);
}

async fn receiver_authorizer_signs_by_its_key_or_else_by_its_code(chain: &dyn Chain) {
    let mut channel = booked(chain).await;
    channel.config.receiver_authorizer = chain.deploy_wallet(channel.authorizer.address()).await;
    book(chain, &channel, 10_000).await;
    let relayer = chain.relayer().await;
    let row = [channel.row(2_000, 2_000).await];
    let stranger = Channel { authorizer: PrivateKeySigner::random(), ..channel.clone() };
    let refused = revert(chain, relayer.address, &claim_call(&row, &stranger.authorizer)).await;
    assert_is::<escrow::InvalidSignature>(&refused);
    assert_is::<escrow::InvalidSignature>(&revert(chain, relayer.address, &refund_call(&stranger, 1, 0)).await);
    assert!(send(chain, &relayer, &claim_call(&row, &channel.authorizer)).await.status());
    assert!(send(chain, &relayer, &refund_call(&channel, 1_000, 0)).await.status());
    assert_eq!(channel.state(chain).await, (9_000, 2_000));
}

async fn signature_has_65_bytes_a_low_s_and_a_v_of_27_or_28(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, 10_000).await;
    let mut of_payer = booked(chain).await;
    (of_payer.config.payer_authorizer, of_payer.voucher_key) = (Address::ZERO, of_payer.payer.clone());
    book(chain, &of_payer, 10_000).await;
    // Each is another form of the same signature.
    let forms = |signature: &[u8]| {
        let order: U256 = "0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141".parse().unwrap();
        let high_s: [u8; 32] = (order - U256::from_be_slice(&signature[32..64])).to_be_bytes();
        [
            (signature[..64].to_vec(), "fce698f7"),
            ([signature, &[0]].concat(), "fce698f7"),
            ([&signature[..32], &high_s, &[55 - signature[64]]].concat(), "d78bce0c"),
            ([&signature[..64], &[signature[64] - 27]].concat(), "f645eedf"),
        ]
    };
    let row = channel.row(2_000, 2_000).await;
    for (form, error) in forms(&row.signature.as_bytes()[..]) {
        let refused = revert(chain, channel.authorizer.address(), &claim_by(&row, form)).await;
        assert_eq!(hex::encode(&refused[..4]), error, "ECDSAInvalidSignature, -Length or -S");
    }
    let row = of_payer.row(2_000, 2_000).await;
    for (form, _) in forms(&row.signature.as_bytes()[..]) {
        let refused = revert(chain, of_payer.authorizer.address(), &claim_by(&row, form)).await;
        assert_is::<escrow::InvalidSignature>(&refused);
    }
    let signed = claim_call(&[channel.row(2_000, 2_000).await], &channel.authorizer);
    let refund = refund_call(&channel, 1, 0);
    for (form, _) in forms(&signed.authorizerSignature) {
        let call = escrow::claimWithSignatureCall { authorizerSignature: form.into(), ..signed.clone() };
        assert_is::<escrow::InvalidSignature>(&revert(chain, random_address(), &call).await);
    }
    for (form, _) in forms(&refund.receiverAuthorizerSignature) {
        let call = escrow::refundWithSignatureCall { receiverAuthorizerSignature: form.into(), ..refund.clone() };
        assert_is::<escrow::InvalidSignature>(&revert(chain, random_address(), &call).await);
    }
}

async fn voucher_stays_valid_after_a_refund_and_another_deposit(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let relayer = chain.relayer().await;
    let voucher = [channel.row(8_000, 8_000).await];
    book(chain, &channel, 10_000).await;
    assert!(send(chain, &relayer, &refund_call(&channel, 10_000, 0)).await.status());
    let refused = revert(chain, channel.authorizer.address(), &claim(&voucher)).await;
    assert_is::<escrow::ClaimExceedsBalance>(&refused);
    book(chain, &channel, 9_000).await;
    assert!(send(chain, &relayer, &claim_call(&voucher, &channel.authorizer)).await.status());
    assert_eq!(channel.state(chain).await, (9_000, 8_000));
}

async fn withdrawal_is_announced_and_made_by_the_payer_or_its_authorizer(chain: &dyn Chain) {
    let channel = channel(chain).await;
    channel.deposit(chain, &chain.relayer().await, 10_000).await;
    let config = || (&channel.config).into();
    let initiate = escrow::initiateWithdrawCall { config: config(), amount: 10_000 };
    let finalize = escrow::finalizeWithdrawCall { config: config() };
    for stranger in [random_address(), channel.config.receiver, channel.config.receiver_authorizer] {
        assert_is::<escrow::InvalidChannel>(&revert(chain, stranger, &initiate).await);
        assert_is::<escrow::NotAuthorizedToFinalizeWithdraw>(&revert(chain, stranger, &finalize).await);
    }
    let by_authorizer = account(chain, &channel.voucher_key).await;
    let announced = send(chain, &by_authorizer, &initiate).await;
    let event = announced.logs().iter().find_map(|log| log.log_decode::<escrow::WithdrawInitiated>().ok()).unwrap();
    let at = chain.timestamp().await;
    assert_eq!((event.inner.amount, event.inner.finalizeAfter.to::<u64>()), (10_000, at + 900));
    chain.set_next_timestamp(at + 900).await;
    let made = send(chain, &by_authorizer, &finalize).await;
    assert_eq!((events::<escrow::WithdrawFinalized>(&made), events::<escrow::ChannelClosed>(&made)), (1, 1));
    let (payer, authorizer) = (channel.config.payer, channel.config.payer_authorizer);
    assert_eq!((chain.balance(payer).await, chain.balance(authorizer).await), (100_000, 0), "it is the payer's");
}

async fn withdrawal_of_what_was_claimed_since_takes_nothing_and_ends(chain: &dyn Chain) {
    let channel = booked(chain).await;
    book(chain, &channel, 10_000).await;
    let by_payer = account(chain, &channel.payer).await;
    let config = || (&channel.config).into();
    let initiate = escrow::initiateWithdrawCall { config: config(), amount: 10_000 };
    let finalize = escrow::finalizeWithdrawCall { config: config() };
    assert!(send(chain, &by_payer, &initiate).await.status());
    let rows = [channel.row(10_000, 10_000).await];
    assert!(send(chain, &chain.relayer().await, &claim_call(&rows, &channel.authorizer)).await.status());
    chain.set_next_timestamp(chain.timestamp().await + 901).await;
    let made = send(chain, &by_payer, &finalize).await;
    let event = made.logs().iter().find_map(|log| log.log_decode::<escrow::WithdrawFinalized>().ok()).unwrap();
    assert_eq!((event.inner.amount, channel.state(chain).await), (0, (10_000, 10_000)));
    assert_is::<escrow::WithdrawalNotPending>(&revert(chain, channel.config.payer, &finalize).await);
}

async fn withdrawal_that_ends_first_leaves_a_signed_refund_whole(chain: &dyn Chain) {
    let channel = channel(chain).await;
    channel.deposit(chain, &chain.relayer().await, 10_000).await;
    let by_payer = account(chain, &channel.payer).await;
    let config = || (&channel.config).into();
    let initiate = escrow::initiateWithdrawCall { config: config(), amount: 3_000 };
    assert!(send(chain, &by_payer, &initiate).await.status());
    chain.set_next_timestamp(chain.timestamp().await + 901).await;
    assert!(send(chain, &by_payer, &escrow::finalizeWithdrawCall { config: config() }).await.status());
    assert!(send(chain, &by_payer, &refund_call(&channel, 2_500, 0)).await.status());
    assert_eq!(channel.state(chain).await, (4_500, 0), "both were paid");
}

async fn withdrawal_waits_for_its_delay_and_takes_only_what_is_left(chain: &dyn Chain) {
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

async fn refund_shrinks_a_pending_withdrawal(chain: &dyn Chain) {
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

async fn signed_refund_is_for_one_nonce(chain: &dyn Chain) {
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

async fn refund_by_the_receiver_uses_up_the_nonce_of_a_signed_one(chain: &dyn Chain) {
    let mut channel = booked(chain).await;
    let receiver = PrivateKeySigner::random();
    channel.config.receiver = receiver.address();
    book(chain, &channel, 10_000).await;
    let signed = refund_call(&channel, 1, 0);
    let direct = escrow::refundCall { config: (&channel.config).into(), amount: 3 };
    for from in [&receiver, &channel.authorizer] {
        assert!(send(chain, &account(chain, from).await, &direct).await.status());
    }
    assert_eq!((refund_nonce(chain, &channel).await, channel.state(chain).await), (U256::from(2), (9_994, 0)));
    assert_is::<escrow::InvalidRefundNonce>(&revert(chain, random_address(), &signed).await);
}

async fn refund_of_an_empty_channel_moves_only_the_nonce(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let receipt = send(chain, &chain.relayer().await, &refund_call(&channel, 5, 0)).await;
    assert!(receipt.status() && receipt.logs().is_empty());
    assert_eq!(refund_nonce(chain, &channel).await, U256::from(1));
}

async fn transfer_that_the_token_refuses_reverts_settlement_and_refund_and_no_claim(chain: &dyn Chain) {
    let channel = channel(chain).await;
    let relayer = chain.relayer().await;
    channel.deposit(chain, &relayer, 10_000).await;
    assert!(send(chain, &relayer, &claim_call(&[channel.row(4_000, 4_000).await], &channel.authorizer)).await.status());
    for barred in [channel.config.receiver, channel.config.payer] {
        chain.blacklist(barred).await;
    }
    let settle = escrow::settleCall { receiver: channel.config.receiver, token: channel.config.token };
    assert!(!send(chain, &relayer, &settle).await.status());
    assert!(!send(chain, &relayer, &refund_call(&channel, 1, 0)).await.status());
    assert_eq!((refund_nonce(chain, &channel).await, channel.state(chain).await), (U256::ZERO, (10_000, 4_000)));
    assert!(send(chain, &relayer, &claim_call(&[channel.row(5_000, 5_000).await], &channel.authorizer)).await.status());
    assert_eq!(channel.state(chain).await, (10_000, 5_000));
}

async fn collector_calls_back_in_vain(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let collector = random_address();
    chain.set_code(collector, Bytes::from_static(&CALLER)).await;
    let config = || (&channel.config).into();
    let (receiver, token) = (channel.config.receiver, channel.config.token);
    for data in [
        escrow::settleCall { receiver, token }.abi_encode(),
        booking(&channel, 1).abi_encode(),
        claim(&[]).abi_encode(),
        claim_call(&[channel.row(1, 1).await], &channel.authorizer).abi_encode(),
        refund_call(&channel, 1, 0).abi_encode(),
        escrow::refundCall { config: config(), amount: 1 }.abi_encode(),
        escrow::initiateWithdrawCall { config: config(), amount: 1 }.abi_encode(),
        escrow::finalizeWithdrawCall { config: config() }.abi_encode(),
        escrow::multicallCall { data: vec![escrow::settleCall { receiver, token }.abi_encode().into()] }.abi_encode(),
    ] {
        let call = escrow::depositCall { collector, collectorData: data.into(), ..booking(&channel, 5) };
        let refused = revert(chain, random_address(), &call).await;
        assert_eq!(hex::encode(&refused), "3ee5aeb5", "ReentrancyGuardReentrantCall");
    }
}

async fn no_call_takes_ether(chain: &dyn Chain) {
    let channel = booked(chain).await;
    let from = channel.authorizer.address();
    chain.fund(from, U256::from(10).pow(U256::from(18))).await;
    let settle = escrow::settleCall { receiver: from, token: channel.config.token }.abi_encode();
    let multicall = escrow::multicallCall { data: vec![] }.abi_encode();
    for data in [booking(&channel, 1).abi_encode(), settle, multicall, Vec::new()] {
        let request = TransactionRequest::default().from(from).to(Escrow::ADDRESS).input(data.into());
        chain.provider().call(request.value(U256::from(1))).await.expect_err("it is not payable");
    }
}

async fn calls_of_one_transaction_keep_their_sender_and_revert_together(chain: &dyn Chain) {
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
    let data = vec![
        escrow::initiateWithdrawCall { config: (&channel.config).into(), amount: 1 }.abi_encode().into(),
        refund_call(&channel, 1, 7).abi_encode().into(),
    ];
    let both = escrow::multicallCall { data };
    assert_is::<escrow::InvalidChannel>(&revert(chain, random_address(), &both).await);
    channel.deposit(chain, &relayer, 10_000).await;
    assert_is::<escrow::InvalidRefundNonce>(&revert(chain, channel.config.payer, &both).await);
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

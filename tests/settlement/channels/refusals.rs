//! What is refused, with which code, before anything is sent.

use std::sync::Arc;

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use support::{
    authorization::{random_address, unix_now},
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    escrow::{Channel, MULTICALL3, install},
    rpc_proxy::{Fate, RpcProxy},
};
use tower_x402::{
    Asset, Clock as _, ManualClock, Network,
    facilitator::{
        OnchainBuildError,
        channels::{ChannelError, ChannelFacilitator as _, OnchainChannels},
    },
    vouchers::{ChannelConfig, Deposit, DepositAuthorization, Escrow, reason},
};

use super::{authorizer, builder, channels, gas_key, order, reason as code};

on_every_chain! {
    a_chain_without_the_contracts_is_refused_at_start_up,
    bad_deposits_are_refused_with_their_code,
    bad_settlements_and_refunds_are_refused_with_their_code,
}

async fn a_chain_without_the_contracts_is_refused_at_start_up(chain: &dyn Chain) {
    install(chain).await;
    let key = gas_key(chain).await;
    builder(chain).signer(key.clone()).build().await.expect("all contracts are there");
    for (address, name) in [
        (Escrow::ADDRESS, "x402BatchSettlement"),
        (Escrow::ERC3009_COLLECTOR, "ERC3009DepositCollector"),
        (MULTICALL3, "Multicall3"),
    ] {
        let code = chain.provider().get_code_at(address).await.unwrap();
        chain.set_code(address, Bytes::new()).await;
        let missing = builder(chain).signer(key.clone()).build().await.unwrap_err();
        assert!(matches!(missing, OnchainBuildError::NoContract { name: found, .. } if found == name), "{missing}");
        assert!(missing.to_string().contains(&address.to_string()));
        chain.set_code(address, code).await;
    }
    let twice = builder(chain).signer(key.clone()).signer(key.clone()).build().await.unwrap_err();
    assert_eq!(twice, OnchainBuildError::SameKey(key.address()));
    for incomplete in [builder(chain), OnchainChannels::builder().signer(key).rpc_url(chain.rpc_url())] {
        assert!(matches!(incomplete.build().await, Err(OnchainBuildError::Missing(_))));
    }
}

async fn bad_deposits_are_refused_with_their_code(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = Channel::funded(chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
    let now = chain.timestamp().await;
    let good = channel.sign_deposit(chain, 10_000, now + 3_600).await;
    let config = channel.config;
    let with = |after: u64, before: u64| {
        let DepositAuthorization::Erc3009 { salt, signature, .. } = good.authorization.clone() else { unreachable!() };
        let (valid_after, valid_before) = (U256::from(after), U256::from(before));
        Deposit { authorization: DepositAuthorization::Erc3009 { valid_after, valid_before, salt, signature }, ..good }
    };
    let by_another = Channel { payer: PrivateKeySigner::random(), ..channel.clone() };
    let cases = [
        (config, Deposit { amount: 0, ..good.clone() }, reason::DEPOSIT_PAYLOAD),
        (ChannelConfig { token: random_address(), ..config }, good.clone(), reason::TOKEN_MISMATCH),
        (ChannelConfig { payer: Address::ZERO, ..config }, good.clone(), reason::DEPOSIT_PAYLOAD),
        (ChannelConfig { receiver: Address::ZERO, ..config }, good.clone(), reason::DEPOSIT_PAYLOAD),
        (
            ChannelConfig { receiver_authorizer: Address::ZERO, ..config },
            good.clone(),
            reason::RECEIVER_AUTHORIZER_MISMATCH,
        ),
        (ChannelConfig { withdraw_delay: 899, ..config }, good.clone(), reason::WITHDRAW_DELAY_OUT_OF_RANGE),
        (ChannelConfig { withdraw_delay: 2_592_001, ..config }, good.clone(), reason::WITHDRAW_DELAY_OUT_OF_RANGE),
        (config, with(0, now), reason::PAYLOAD_AUTHORIZATION_VALID_BEFORE),
        (config, with(now + 3_600, now + 7_200), reason::PAYLOAD_AUTHORIZATION_VALID_AFTER),
        (config, channel.sign_deposit(chain, 100_001, now + 3_600).await, reason::INSUFFICIENT_BALANCE),
        (config, by_another.sign_deposit(chain, 10_000, now + 3_600).await, reason::RECEIVE_AUTHORIZATION_SIGNATURE),
        // The authorization names its channel.
        (ChannelConfig { salt: B256::repeat_byte(1), ..config }, good.clone(), reason::RECEIVE_AUTHORIZATION_SIGNATURE),
        (config, Deposit { amount: 9_999, ..good.clone() }, reason::RECEIVE_AUTHORIZATION_SIGNATURE),
    ];
    for (config, deposit, expected) in &cases {
        assert_eq!(code(channels.verify_deposit(config, deposit).await), *expected);
        assert_eq!(code(channels.deposit(config, &channel.voucher(1), deposit).await), *expected);
    }
    chain.blacklist(config.payer).await;
    assert_eq!(code(channels.deposit(&config, &channel.voucher(1), &good).await), reason::DEPOSIT_SIMULATION_FAILED);
    assert_eq!(chain.provider().get_transaction_count(channels.senders()[0]).await.unwrap(), 0, "nothing was sent");
}

async fn bad_settlements_and_refunds_are_refused_with_their_code(chain: &dyn Chain) {
    let channels = channels(chain).await;
    let channel = Channel::funded(chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
    let other = Channel::funded(chain, random_address(), &channel.authorizer, 100_000).await;
    let key = authorizer(&channel);
    assert_eq!(code(channels.settle(random_address(), random_address()).await), reason::TOKEN_MISMATCH);
    let another = Asset::new(Network::BASE_SEPOLIA, random_address(), "USDC", "2");
    let another = builder(chain).asset(another).signer(gas_key(chain).await).build().await.unwrap();
    assert_eq!(code(another.settle(random_address(), chain.asset().address).await), reason::TOKEN_MISMATCH);
    let nothing = order(&channel, 1, 0, None);
    assert_eq!(code(channels.refund(&nothing, &key).await), reason::REFUND_NO_BALANCE);
    channel.deposit(chain, &chain.relayer().await, 10_000).await;
    let mut foreign = nothing.clone();
    foreign.config.token = random_address();
    for (order, expected) in [
        (order(&channel, 0, 0, None), reason::REFUND_AMOUNT_INVALID),
        (order(&channel, 1, 0, Some(channel.row(10_000, 10_000).await)), reason::REFUND_NO_BALANCE),
        (order(&channel, 1, 0, Some(other.row(1, 1).await)), reason::REFUND_PAYLOAD),
        (order(&channel, 1, 1, None), reason::REFUND_SIMULATION_FAILED),
        (order(&channel, 1, 0, Some(channel.row(1, 2).await)), reason::REFUND_SIMULATION_FAILED),
        (foreign, reason::TOKEN_MISMATCH),
    ] {
        assert_eq!(code(channels.refund(&order, &key).await), expected, "{order:?}");
    }
    let stranger = authorizer(&Channel { authorizer: PrivateKeySigner::random(), ..channel.clone() });
    assert_eq!(code(channels.refund(&nothing, &stranger).await), reason::REFUND_SIMULATION_FAILED);
    assert_eq!(chain.provider().get_transaction_count(channels.senders()[0]).await.unwrap(), 0, "nothing was sent");
}

#[tokio::test]
async fn bounds_of_time_money_and_gas_are_where_they_are_said_to_be() {
    // Its time stands still, however long this takes.
    let chain = DevnetChain::start_at(unix_now()).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let block = chain.timestamp().await;
    let clock = Arc::new(ManualClock::at(block));
    let key = gas_key(&chain).await;
    let channels = builder(&chain).rpc_url(proxy.url()).clock(clock.clone()).signer(key.clone());
    let channels = Arc::new(channels.build().await.unwrap());
    assert_eq!(channels.senders(), [key.address()]);
    let channel = Channel::funded(&chain, random_address(), &PrivateKeySigner::random(), 10_000).await;
    // Money for gas made a block, too.
    let block = chain.timestamp().await.max(block);
    clock.advance(block - clock.now());

    // The least time that is left, and all that the payer has.
    let refused = async |before: u64, after: u64| {
        let mut deposit = channel.sign_deposit(&chain, 10_000, before).await;
        let DepositAuthorization::Erc3009 { valid_after, .. } = &mut deposit.authorization else { unreachable!() };
        *valid_after = U256::from(after);
        match channels.verify_deposit(&channel.config, &deposit).await {
            Ok(_) => None,
            refused => Some(code(refused)),
        }
    };
    assert_eq!(refused(block + 5, 0).await, Some(reason::PAYLOAD_AUTHORIZATION_VALID_BEFORE));
    assert_eq!(refused(block + 6, 0).await, None);
    assert_eq!(refused(block + 60, block + 1).await, Some(reason::PAYLOAD_AUTHORIZATION_VALID_AFTER));
    // The payer signed for another time.
    assert_eq!(refused(block + 60, block).await, Some(reason::RECEIVE_AUTHORIZATION_SIGNATURE));

    // 400,000 gas, and one more.
    for (estimate, expected) in [("\"0x61a80\"", None), ("\"0x61a81\"", Some(reason::DEPOSIT_SIMULATION_FAILED))] {
        proxy.judge(move |methods| match methods {
            [method] if method == "eth_estimateGas" => Fate::Result(estimate),
            _ => Fate::Pass,
        });
        assert_eq!(refused(block + 60, 0).await, expected, "{estimate}");
    }

    // The newest block may be two minutes old.
    clock.advance(120);
    channels.observe(&[channel.id()]).await.unwrap();
    clock.advance(1);
    let old = channels.observe(&[channel.id()]).await;
    assert!(matches!(old, Err(ChannelError::Unavailable(_))), "{old:?}");
}

//! Blocks, the pool and JSON-RPC of the devnet behave as those of a node.

use std::{sync::Arc, time::Duration};

use alloy_consensus::{SignableTransaction as _, TxEip7702, TxEnvelope};
use alloy_eips::{BlockId, BlockNumberOrTag, Encodable2718 as _, eip7702::Authorization};
use alloy_primitives::{Address, B256, Bytes, U64, U256, address, bytes};
use alloy_provider::{Provider as _, RootProvider};
use alloy_rpc_client::RpcClient;
use alloy_rpc_types_eth::{Filter, TransactionRequest};
use alloy_signer::SignerSync as _;
use alloy_sol_types::{SolCall as _, SolEvent as _};
use tower_x402::{ManualClock, Network};
use x402_devnet::{BlockTime, Devnet, Orphans};

use super::fixture::*;

async fn broadcast(devnet: &Devnet, raw: &Bytes) -> Result<(), String> {
    match devnet.provider().send_raw_transaction(raw).await {
        Ok(_) => Ok(()),
        Err(error) => Err(error.as_error_resp().expect("an answer").message.to_string()),
    }
}

#[tokio::test]
async fn default_network_is_base_sepolia() {
    let (devnet, _) = devnet().await;
    assert_eq!(devnet.network(), Network::BASE_SEPOLIA);
    assert_eq!(Some(devnet.asset()), Network::BASE_SEPOLIA.usdc());
    let base = Devnet::builder().chain_id(8453).start().await.unwrap();
    assert_eq!(Some(base.asset()), Network::BASE.usdc());
    assert_eq!(base.provider().get_chain_id().await.unwrap(), 8453);
    let other = Devnet::builder().chain_id(31337).start().await.unwrap();
    assert_eq!(other.asset().network, Network::eip155(31337));
    assert_eq!(other.asset().address, devnet.asset().address);
}

#[tokio::test]
async fn a_transaction_is_mined_at_once_and_its_fee_charged() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    let before = devnet.eth_balance(sender.address());
    let (hash, raw) = raw(transaction(&devnet, 0), &sender);
    let receipt = provider.send_raw_transaction(&raw).await.unwrap().get_receipt().await.unwrap();
    assert!(receipt.status());
    assert_eq!((receipt.transaction_hash, receipt.from, receipt.to), (hash, sender.address(), Some(PAYEE)));
    assert_eq!((receipt.gas_used, receipt.effective_gas_price), (21_000, 6_000_000));
    assert_eq!(devnet.eth_balance(sender.address()), before - U256::from(21_000 * 6_000_000_u64));

    let block = provider.get_block_by_number(BlockNumberOrTag::Latest).full().await.unwrap().unwrap();
    assert_eq!((Some(block.header.hash), Some(block.header.number)), (receipt.block_hash, receipt.block_number));
    assert_eq!(block.header.base_fee_per_gas, Some(5_000_000));
    let transaction = provider.get_transaction_by_hash(hash).await.unwrap().unwrap();
    assert_eq!(block.transactions.as_transactions().unwrap(), std::slice::from_ref(&transaction));
    assert_eq!(transaction.inner.signer(), sender.address());
    let by_hash = provider.get_block_by_hash(block.header.hash).await.unwrap().unwrap();
    assert_eq!(by_hash.transactions.as_hashes().unwrap(), [hash]);
    let parent = provider.get_block_by_number((block.header.number - 1).into()).await.unwrap().unwrap();
    assert_eq!(parent.header.hash, block.header.parent_hash);
}

#[tokio::test]
async fn transactions_of_every_type_run() {
    use alloy_consensus::{TxEip2930, TxLegacy};
    let (devnet, _) = devnet().await;
    let sender = sender(&devnet);
    let (chain_id, gas_price, to) = (devnet.chain_id(), 5_000_000, PAYEE.into());
    let legacy = TxLegacy { chain_id: Some(chain_id), gas_price, gas_limit: 21_000, to, ..TxLegacy::default() };
    let signature = sender.sign_hash_sync(&legacy.signature_hash()).unwrap();
    let legacy = TxEnvelope::from(legacy.into_signed(signature));
    let listed = TxEip2930 { chain_id, nonce: 1, gas_price, gas_limit: 21_000, to, ..TxEip2930::default() };
    let signature = sender.sign_hash_sync(&listed.signature_hash()).unwrap();
    let listed = TxEnvelope::from(listed.into_signed(signature));
    let code = deploy_wallet(&devnet, PAYEE);
    let payer = payer(&devnet);
    let delegation = Authorization { chain_id: U256::from(chain_id), address: code, nonce: 0 };
    let signature = payer.sign_hash_sync(&delegation.signature_hash()).unwrap();
    let delegating = TxEip7702 {
        chain_id,
        nonce: 2,
        gas_limit: 100_000,
        max_fee_per_gas: 10_000_000,
        to: PAYEE,
        authorization_list: vec![delegation.into_signed(signature)],
        ..TxEip7702::default()
    };
    let signature = sender.sign_hash_sync(&delegating.signature_hash()).unwrap();
    let delegating = TxEnvelope::from(delegating.into_signed(signature));
    for (kind, transaction) in [legacy, listed, delegating].into_iter().enumerate() {
        let provider = devnet.provider();
        let receipt = provider.send_raw_transaction_sync(&transaction.encoded_2718()).await.unwrap();
        assert!(receipt.status(), "{kind}");
        assert_eq!(receipt.inner.tx_type(), transaction.tx_type());
    }
    let code_at_payer = devnet.provider().get_code_at(payer.address()).await.unwrap();
    assert_eq!(code_at_payer, [&[0xef, 0x01, 0x00], code.as_slice()].concat());
}

#[tokio::test]
async fn transactions_after_a_nonce_gap_wait() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    let address = sender.address();
    let (late, late_raw) = raw(transaction(&devnet, 1), &sender);
    broadcast(&devnet, &late_raw).await.unwrap();
    assert_eq!(provider.get_transaction_receipt(late).await.unwrap(), None);
    assert_eq!(provider.get_transaction_by_hash(late).await.unwrap().unwrap().block_number, None);
    assert_eq!(provider.get_transaction_count(address).pending().await.unwrap(), 0);
    assert_eq!(broadcast(&devnet, &late_raw).await.unwrap_err(), "already known");

    broadcast(&devnet, &raw(transaction(&devnet, 0), &sender).1).await.unwrap();
    let receipt = provider.get_transaction_receipt(late).await.unwrap().unwrap();
    assert_eq!((receipt.transaction_index, receipt.inner.cumulative_gas_used()), (Some(1), 42_000));
    assert_eq!(provider.get_transaction_count(address).await.unwrap(), 2);
    let error = broadcast(&devnet, &late_raw).await.unwrap_err();
    assert!(error.starts_with("nonce too low"), "{error}");
}

#[tokio::test]
async fn replacement_needs_ten_percent_more() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    devnet.stall(true);
    let old = transaction(&devnet, 0);
    let (old_hash, old_raw) = raw(old.clone(), &sender);
    broadcast(&devnet, &old_raw).await.unwrap();
    let mut new = old;
    new.max_fee_per_gas = 11_000_000;
    new.max_priority_fee_per_gas = 1_099_999;
    let error = broadcast(&devnet, &raw(new.clone(), &sender).1).await.unwrap_err();
    assert_eq!(error, "replacement transaction underpriced");
    new.max_priority_fee_per_gas = 1_100_000;
    let (new_hash, new_raw) = raw(new, &sender);
    broadcast(&devnet, &new_raw).await.unwrap();
    assert_eq!(provider.get_transaction_count(sender.address()).pending().await.unwrap(), 1);
    devnet.stall(false);
    assert!(provider.get_transaction_receipt(new_hash).await.unwrap().is_some());
    assert!(provider.get_transaction_by_hash(old_hash).await.unwrap().is_none());
}

#[tokio::test]
async fn invalid_transactions_are_rejected_as_by_nodes() {
    let (devnet, _) = devnet().await;
    let sender = sender(&devnet);
    let good = transaction(&devnet, 0);
    for (bad, reason) in [
        (alloy_consensus::TxEip1559 { gas_limit: 20_999, ..good.clone() }, "intrinsic gas too low"),
        (alloy_consensus::TxEip1559 { gas_limit: (1 << 24) + 1, ..good.clone() }, "transaction gas limit too high"),
        (alloy_consensus::TxEip1559 { value: U256::MAX, ..good.clone() }, "insufficient funds for gas * price + value"),
        (alloy_consensus::TxEip1559 { chain_id: 1, ..good.clone() }, "invalid sender"),
        (
            alloy_consensus::TxEip1559 { max_priority_fee_per_gas: 10_000_001, ..good.clone() },
            "max priority fee per gas higher than max fee per gas",
        ),
    ] {
        let error = broadcast(&devnet, &raw(bad, &sender).1).await.unwrap_err();
        assert!(error.starts_with(reason), "{error}");
    }
    assert_eq!(devnet.block_number(), 0);
    for nonce in 1..=16 {
        broadcast(&devnet, &raw(transaction(&devnet, nonce), &sender).1).await.unwrap();
    }
    let seventeenth = raw(transaction(&devnet, 17), &sender).1;
    assert_eq!(broadcast(&devnet, &seventeenth).await.unwrap_err(), "txpool is full");
    // But for the one that they all wait for.
    broadcast(&devnet, &raw(transaction(&devnet, 0), &sender).1).await.unwrap();
    assert_eq!(devnet.provider().get_transaction_count(sender.address()).await.unwrap(), 17);
}

#[tokio::test]
async fn transaction_below_the_base_fee_waits() {
    let (devnet, _) = devnet().await;
    let sender = sender(&devnet);
    devnet.set_base_fee(10_000_001);
    let (hash, raw) = raw(transaction(&devnet, 0), &sender);
    broadcast(&devnet, &raw).await.unwrap();
    assert_eq!(devnet.block_number(), 0);
    devnet.set_base_fee(10_000_000);
    let receipt = devnet.provider().get_transaction_receipt(hash).await.unwrap().unwrap();
    assert_eq!(receipt.effective_gas_price, 10_000_000);
}

#[tokio::test(start_paused = true)]
async fn blocks_at_an_interval_may_share_a_timestamp() {
    let (clock, period) = (std::sync::Arc::new(tower_x402::ManualClock::at(NOW)), Duration::from_millis(200));
    let devnet = Devnet::builder().block_time(BlockTime::Every(period)).clock(clock.clone()).start().await.unwrap();
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    tokio::time::sleep(period * 2 + period / 2).await;
    assert_eq!(devnet.block_number(), 2);
    let waiting = raw(transaction(&devnet, 0), &sender);
    broadcast(&devnet, &waiting.1).await.unwrap();
    assert!(provider.get_transaction_receipt(waiting.0).await.unwrap().is_none());
    clock.advance(1);
    let synced = provider.send_raw_transaction_sync(&raw(transaction(&devnet, 1), &sender).1).await.unwrap();
    assert_eq!((synced.block_number, synced.transaction_index), (Some(3), Some(1)));
    let mut times = Vec::new();
    for number in 0..=3 {
        times.push(provider.get_block_by_number(number.into()).await.unwrap().unwrap().header.timestamp);
    }
    assert_eq!(times, [NOW, NOW, NOW, NOW + 1]);
}

#[tokio::test(start_paused = true)]
async fn synchronous_send_times_out_and_the_transaction_stays() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    devnet.stall(true);
    let (hash, raw) = raw(transaction(&devnet, 0), &sender);
    let error = provider.send_raw_transaction_sync(&raw).await.unwrap_err();
    let error = error.as_error_resp().unwrap();
    assert_eq!(error.code, 4);
    assert_eq!(error.try_data_as::<B256>().unwrap().unwrap(), hash);
    devnet.mine();
    assert!(provider.get_transaction_receipt(hash).await.unwrap().is_some());
}

#[tokio::test]
async fn time_passes_for_calls_without_blocks() {
    let (devnet, clock) = devnet().await;
    // Returns the timestamp.
    let contract = Address::repeat_byte(0x71);
    devnet.set_code(contract, bytes!("425f5260205ff3"));
    clock.advance(100);
    let now = U256::from_be_slice(&devnet.call(contract, Bytes::new()).unwrap());
    assert_eq!(now, U256::from(NOW + 100));
    let (provider, request) = (devnet.provider(), TransactionRequest::default().to(contract));
    let final_block = provider.call(request).block(BlockId::finalized()).await.unwrap();
    assert_eq!(U256::from_be_slice(&final_block), U256::from(NOW));
}

#[tokio::test]
async fn past_states_can_be_read() {
    let devnet = Devnet::builder().finality_depth(2).start().await.unwrap();
    let provider = devnet.provider();
    let holder = Address::repeat_byte(0x01);
    let balance = Usdc::transferCall { to: holder, value: U256::from(1) };
    devnet.mint(RELAYER, "$1".parse().unwrap()).unwrap();
    for _ in 0..3 {
        devnet.execute(RELAYER, devnet.asset().address, balance.abi_encode()).unwrap();
    }
    // balanceOf(holder)
    let input: Bytes = [&[0x70, 0xa0, 0x82, 0x31], holder.into_word().as_slice()].concat().into();
    let request = TransactionRequest::default().to(devnet.asset().address).input(input.into());
    for (block, units) in
        [(BlockId::latest(), 3), (BlockId::finalized(), 1), (BlockId::earliest(), 0), (BlockId::number(3), 2)]
    {
        let answer = provider.call(request.clone()).block(block).await.unwrap();
        assert_eq!(U256::from_be_slice(&answer), U256::from(units), "{block:?}");
    }
    assert_eq!(provider.get_transaction_count(RELAYER).block_id(BlockId::number(2)).await.unwrap(), 1);
    assert!(provider.call(request).block(BlockId::number(99)).await.is_err());
}

#[tokio::test]
async fn logs_are_found_by_address_topic_range_and_block() {
    let (devnet, _) = devnet().await;
    let (asset, payer, provider) = (devnet.asset(), payer(&devnet), devnet.provider());
    let receipt = send(&devnet, authorization(payer.address(), 1_000).signed(&asset, &payer)).unwrap();
    let all = Filter::new().address(asset.address).from_block(0);
    assert_eq!(provider.get_logs(&all).await.unwrap().len(), 4, "mint has two, the payment two");
    let used = all.clone().event_signature(Usdc::AuthorizationUsed::SIGNATURE_HASH).topic1(payer.address());
    assert_eq!(provider.get_logs(&used).await.unwrap(), receipt.logs()[..1]);
    assert_eq!(receipt.logs()[1].log_index, Some(1));
    let in_block = Filter::new().at_block_hash(receipt.block_hash.unwrap());
    assert_eq!(provider.get_logs(&in_block).await.unwrap(), receipt.logs());
    assert_eq!(provider.get_logs(&Filter::new().select(1..=1_u64)).await.unwrap().len(), 2);
    assert!(provider.get_logs(&Filter::new().select(9..=99_u64)).await.unwrap().is_empty());
    assert!(provider.get_logs(&Filter::new().address(PAYEE).from_block(0)).await.unwrap().is_empty());
}

#[tokio::test]
async fn estimates_are_enough_and_reverts_are_explained() {
    let (devnet, _) = devnet().await;
    let (asset, payer, provider) = (devnet.asset(), payer(&devnet), devnet.provider());
    let payment = authorization(payer.address(), 1_000);
    let request = |input: Bytes| TransactionRequest::default().from(RELAYER).to(asset.address).input(input.into());
    let good = request(payment.signed(&asset, &payer));
    let gas = provider.estimate_gas(good.clone()).await.unwrap();
    assert!(provider.call(good.clone().gas_limit(gas)).await.is_ok());
    assert!(provider.call(good.gas_limit(gas - 1)).await.is_err());
    let bad = request(payment.signed(&asset, &key(0x33)));
    let error = provider.estimate_gas(bad.clone()).await.unwrap_err();
    let error = error.as_error_resp().unwrap();
    assert_eq!((error.code, &*error.message), (3, "execution reverted: FiatTokenV2: invalid signature"));
    assert!(provider.call(bad).await.unwrap_err().as_error_resp().unwrap().as_revert_data().is_some());
}

#[tokio::test]
async fn estimates_see_the_pool_where_the_node_has_a_pending_state() {
    for pending_state in [false, true] {
        let clock = Arc::new(ManualClock::at(NOW));
        let devnet = Devnet::builder().clock(clock).pending_state(pending_state).start().await.unwrap();
        let (asset, payer, sender) = (devnet.asset(), payer(&devnet), sender(&devnet));
        devnet.stall(true);
        let input = authorization(payer.address(), 1_000).signed(&asset, &payer);
        let mut settling = transaction(&devnet, 0);
        (settling.gas_limit, settling.to, settling.input) = (200_000, asset.address.into(), input.clone());
        let (hash, raw) = raw(settling, &sender);
        broadcast(&devnet, &raw).await.unwrap();
        let provider = devnet.provider();
        let again = TransactionRequest::default().from(RELAYER).to(asset.address).input(input.into());
        let of = async |block: BlockId| {
            let (call, estimate) = (provider.call(again.clone()), provider.estimate_gas(again.clone()));
            (call.block(block).await.is_ok(), estimate.block(block).await.is_ok())
        };
        for _ in 0..2 {
            assert_eq!(of(BlockId::pending()).await, (!pending_state, !pending_state));
            assert_eq!(of(BlockId::latest()).await, (true, true));
            let estimated = provider.raw_request::<_, U64>("eth_estimateGas".into(), [again.clone()]).await;
            assert_eq!(estimated.is_ok(), !pending_state, "it names no block");
            assert_eq!(provider.get_transaction_count(sender.address()).pending().await.unwrap(), 1);
        }
        devnet.stall(false);
        assert!(provider.get_transaction_receipt(hash).await.unwrap().unwrap().status());
        assert!(provider.estimate_gas(again).await.is_err());
    }
}

#[tokio::test]
async fn reorganization_requeues_or_drops_transactions() {
    let (devnet, _) = devnet().await;
    let (asset, payer, sender) = (devnet.asset(), payer(&devnet), sender(&devnet));
    let mut settling = transaction(&devnet, 0);
    settling.gas_limit = 200_000;
    settling.to = asset.address.into();
    settling.input = authorization(payer.address(), 1_000).signed(&asset, &payer);
    let provider = devnet.provider();
    let (hash, raw) = raw(settling, &sender);
    let first = provider.send_raw_transaction_sync(&raw).await.unwrap();

    devnet.reorg(1, Orphans::Requeued);
    let second = provider.get_transaction_receipt(hash).await.unwrap().unwrap();
    assert_ne!(first.block_hash, second.block_hash);
    assert_eq!(first.block_number, second.block_number);
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());

    devnet.reorg(1, Orphans::Lost);
    assert!(provider.get_transaction_by_hash(hash).await.unwrap().is_none());
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0".parse().unwrap());
    assert_eq!(devnet.balance_of(payer.address()).unwrap(), "$1".parse().unwrap());
    broadcast(&devnet, &raw).await.unwrap();
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
}

#[tokio::test]
async fn contracts_deploy_at_the_same_address_everywhere() {
    let (devnet, _) = devnet().await;
    let deployer = address!("4e59b44847b379578588920cA78FbF26c0B4956C");
    // Creation code of a contract whose code is one STOP.
    let initcode = bytes!("60015ff3");
    devnet.execute(RELAYER, deployer, [B256::ZERO.as_slice(), &initcode].concat()).unwrap();
    let code = devnet.provider().get_code_at(deployer.create2_from_code(B256::ZERO, initcode)).await.unwrap();
    assert_eq!(code, bytes!("00"));
}

#[tokio::test]
async fn every_call_of_alloy_is_answered() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    broadcast(&devnet, &raw(transaction(&devnet, 0), &sender).1).await.unwrap();
    assert_eq!(provider.get_net_version().await.unwrap(), 84532);
    assert!(provider.get_client_version().await.unwrap().starts_with("tower-x402-devnet/"));
    assert_eq!(provider.get_gas_price().await.unwrap(), 6_000_000);
    let fees = provider.estimate_eip1559_fees().await.unwrap();
    assert!(fees.max_fee_per_gas > 5_000_000, "{fees:?}");
    assert_eq!(provider.get_fee_history(5, BlockNumberOrTag::Latest, &[]).await.unwrap().base_fee_per_gas.len(), 3);
    assert_eq!(provider.get_balance(sender.address()).await.unwrap(), devnet.eth_balance(sender.address()));
    assert!(matches!(provider.syncing().await.unwrap(), alloy_rpc_types_eth::SyncStatus::None));
    let owner = provider.get_storage_at(devnet.asset().address, U256::from(2)).await.unwrap();
    assert!(!owner.is_zero());
    let error = provider.raw_request::<_, ()>("eth_unheardOf".into(), ()).await.unwrap_err();
    assert_eq!(error.as_error_resp().unwrap().code, -32601);
    let error = provider.raw_request::<_, ()>("eth_getBalance".into(), ("nobody",)).await.unwrap_err();
    assert_eq!(error.as_error_resp().unwrap().code, -32602);
}

#[tokio::test]
async fn calls_of_the_devnet_itself_are_on_the_chain() {
    let (devnet, _) = devnet().await;
    let (payer, provider) = (payer(&devnet), devnet.provider());
    let block = provider.get_block_by_number(BlockNumberOrTag::Latest).full().await.unwrap().unwrap();
    let [mint] = block.transactions.as_transactions().unwrap() else { panic!("{block:?}") };
    let owner = devnet.call(devnet.asset().address, Usdc::ownerCall {}.abi_encode()).unwrap();
    assert_eq!((mint.inner.signer().into_word(), mint.effective_gas_price), (B256::from_slice(&owner), Some(0)));
    let receipt = provider.get_transaction_receipt(*mint.inner.tx_hash()).await.unwrap().unwrap();
    let minted = Usdc::Transfer::decode_log(&receipt.logs()[1].inner).unwrap();
    assert_eq!((minted.from, minted.to, minted.value), (Address::ZERO, payer.address(), U256::from(1_000_000)));

    let error = devnet.execute(RELAYER, devnet.asset().address, Usdc::pauseCall {}.abi_encode()).unwrap_err();
    assert_eq!(error.to_string(), "execution reverted: Ownable: caller is not the owner");
    let block = provider.get_block_by_number(BlockNumberOrTag::Latest).await.unwrap().unwrap();
    let hash = block.transactions.as_hashes().unwrap()[0];
    assert!(!provider.get_transaction_receipt(hash).await.unwrap().unwrap().status());
}

#[tokio::test]
async fn state_can_be_set_over_json_rpc() {
    let (devnet, _) = devnet().await;
    let (provider, account) = (devnet.provider(), Address::repeat_byte(0x01));
    let call = |method: &'static str| provider.client().request_noparams::<serde_json::Value>(method);
    call("evm_mine").await.unwrap();
    assert_eq!(devnet.block_number(), 1);
    for (method, params, balance) in [
        ("devnet_fund", serde_json::json!([account, "0x5"]), 5),
        ("devnet_fund", serde_json::json!([account, "0x5"]), 10),
        ("anvil_setBalance", serde_json::json!([account, "0x3"]), 3),
    ] {
        let _: serde_json::Value = provider.raw_request(method.into(), params).await.unwrap();
        assert_eq!(devnet.eth_balance(account), U256::from(balance), "{method}");
    }
    let _: serde_json::Value = provider.raw_request("anvil_setCode".into(), (account, "0x00")).await.unwrap();
    assert_eq!(provider.get_code_at(account).await.unwrap(), bytes!("00"));
}

#[tokio::test]
async fn a_port_answers_calls_and_batches() {
    let (devnet, _) = devnet().await;
    let port = devnet.serve("127.0.0.1:0").await.unwrap();
    let provider: RootProvider = RootProvider::new_http(port.url().clone());
    assert_eq!(provider.get_chain_id().await.unwrap(), 84532);
    let holder = Address::repeat_byte(0x01);
    let _: B256 = provider.raw_request("devnet_mint".into(), (holder, U256::from(7))).await.unwrap();
    assert_eq!(devnet.balance_of(holder).unwrap().atomic(), 7);
    let client = RpcClient::new_http(port.url().clone());
    let mut batch = client.new_batch();
    let chain_id = batch.add_call::<_, U64>("eth_chainId", &()).unwrap();
    let head = batch.add_call::<_, U64>("eth_blockNumber", &()).unwrap();
    batch.send().await.unwrap();
    assert_eq!((chain_id.await.unwrap().to::<u64>(), head.await.unwrap().to::<u64>()), (84532, 1));

    let client = reqwest::Client::new();
    let post = |body: &'static str| client.post(port.url().clone()).body(body).send();
    assert!(post("nonsense").await.unwrap().text().await.unwrap().contains("-32700"));
    let too_large = client.post(port.url().clone()).body(vec![b' '; 3 << 20]).send().await;
    assert!(too_large.is_err() || too_large.unwrap().status() == 413);
    drop(port);
    support::eventually::eventually("nobody answers on the port", async || provider.get_chain_id().await.is_err())
        .await;
}

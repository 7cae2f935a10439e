//! Fault injection affects the calls that it is set for.

use std::time::Duration;

use alloy_provider::{Provider as _, RootProvider};
use x402_devnet::{Devnet, Fault};

use super::fixture::*;

fn once(devnet: &Devnet, method: &'static str, fault: Fault) {
    devnet.faults().reset();
    devnet.faults().set(move |call| match (call.method == method, call.index) {
        (true, 0) => fault.clone(),
        _ => Fault::None,
    });
}

#[tokio::test]
async fn faults_before_have_no_effect_and_faults_after_have_one() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    let send = "eth_sendRawTransaction";
    let error = || (-32005, "too many requests".to_owned());
    for (nonce, fault, answered) in [
        (0, Fault::DropAfter, false),
        (
            1,
            {
                let (code, message) = error();
                Fault::ErrorAfter { code, message }
            },
            true,
        ),
    ] {
        once(&devnet, send, fault);
        let failed = provider.send_raw_transaction(&raw(transaction(&devnet, nonce), &sender).1).await.unwrap_err();
        assert_eq!(failed.is_error_resp(), answered);
        assert_eq!(provider.get_transaction_count(sender.address()).await.unwrap(), nonce + 1);
    }
    for (fault, answered) in [
        (Fault::DropBefore, false),
        (
            {
                let (code, message) = error();
                Fault::Error { code, message }
            },
            true,
        ),
    ] {
        once(&devnet, send, fault);
        let raw = raw(transaction(&devnet, 2), &sender).1;
        let failed = provider.send_raw_transaction(&raw).await.unwrap_err();
        assert_eq!(failed.is_error_resp(), answered);
        assert_eq!(provider.get_transaction_count(sender.address()).await.unwrap(), 2);
    }
    let _sent = provider.send_raw_transaction(&raw(transaction(&devnet, 2), &sender).1).await.unwrap();
    assert_eq!(devnet.faults().calls()[send], 2, "the failed one and this one, since the last reset");
}

#[tokio::test(start_paused = true)]
async fn delays_are_before_or_after_the_effect() {
    let (devnet, _) = devnet().await;
    let (sender, delay) = (sender(&devnet), Duration::from_secs(3));
    for (nonce, fault, at_once) in [(0, Fault::Delay(delay), 0), (1, Fault::DelayAfter(delay), 2)] {
        once(&devnet, "eth_sendRawTransaction", fault);
        let (provider, raw) = (devnet.provider(), raw(transaction(&devnet, nonce), &sender).1);
        let start = tokio::time::Instant::now();
        let sent = tokio::spawn(async move { provider.send_raw_transaction(&raw).await.map(drop) });
        tokio::time::sleep(delay / 2).await;
        assert_eq!(devnet.block_number(), at_once);
        sent.await.unwrap().unwrap();
        assert_eq!((start.elapsed(), devnet.block_number()), (delay, nonce + 1));
    }
}

#[tokio::test]
async fn a_duplicate_arrives_twice_and_the_second_answer_counts() {
    let (devnet, _) = devnet().await;
    let (provider, sender) = (devnet.provider(), sender(&devnet));
    once(&devnet, "eth_sendRawTransaction", Fault::Duplicate);
    let failed = provider.send_raw_transaction(&raw(transaction(&devnet, 0), &sender).1).await.unwrap_err();
    assert!(failed.to_string().contains("nonce too low"), "{failed}");
    assert_eq!(provider.get_transaction_count(sender.address()).await.unwrap(), 1);
    assert_eq!(devnet.faults().calls()["eth_sendRawTransaction"], 1, "the caller called once");
}

#[tokio::test]
async fn random_faults_hit_their_share_of_calls_by_seed() {
    let (devnet, _) = devnet().await;
    let provider = devnet.provider();
    let failures = async |seed: u64, rate: f64| {
        devnet.faults().reset();
        devnet.faults().random(seed, rate);
        let mut failed: Vec<u32> = Vec::new();
        for index in 0..1_000 {
            if provider.get_chain_id().await.is_err() {
                failed.push(index);
            }
        }
        failed
    };
    // Four of the seven faults are noticed by a caller that only reads; delays cost time.
    tokio::time::pause();
    let failed = failures(1, 0.1).await;
    assert!((30..90).contains(&failed.len()), "{}", failed.len());
    assert_eq!(failures(1, 0.1).await, failed);
    assert_ne!(failures(2, 0.1).await, failed);
    assert!(failures(1, 0.0).await.is_empty());
}

#[tokio::test]
async fn the_hook_sees_the_parameters() {
    let (devnet, _) = devnet().await;
    devnet.faults().set(|call| match call.params.first().and_then(|tag| tag.as_str()) {
        Some("finalized") => Fault::Error { code: -32000, message: "finalized block not found".into() },
        _ => Fault::None,
    });
    let provider = devnet.provider();
    assert!(provider.get_block_by_number(alloy_eips::BlockNumberOrTag::Finalized).await.is_err());
    assert!(provider.get_block_by_number(alloy_eips::BlockNumberOrTag::Latest).await.is_ok());
    devnet.faults().clear();
    assert!(provider.get_block_by_number(alloy_eips::BlockNumberOrTag::Finalized).await.is_ok());
}

#[tokio::test]
async fn dropped_call_on_the_port_is_a_bad_gateway() {
    let (devnet, _) = devnet().await;
    let port = devnet.serve("127.0.0.1:0").await.unwrap();
    let provider: RootProvider = RootProvider::new_http(port.url().clone());
    once(&devnet, "eth_chainId", Fault::DropBefore);
    let error = provider.get_chain_id().await.unwrap_err();
    assert!(error.to_string().contains("502"), "{error}");
    assert_eq!(provider.get_chain_id().await.unwrap(), 84532);
}

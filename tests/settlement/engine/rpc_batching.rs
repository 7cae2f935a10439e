//! Payments that are verified at about the same time share requests to the node, and nothing else.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::{future::join_all, poll};
use tower_x402::{
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, VerifyError},
    payment::{Prechecked, Verified},
    protocol::Reason,
};
use x402_devnet::DevnetPort;

use support::{
    engine_stage::*,
    eventually::in_time,
    rpc_proxy::{Fate, RpcProxy},
};

/// A facilitator that reaches its devnet over HTTP, through a proxy.
struct Remote {
    stage: Stage,
    proxy: RpcProxy,
    facilitator: OnchainFacilitator,
    _port: DevnetPort,
}

impl Remote {
    /// Its node has as long as a busy machine may take.
    async fn new() -> Self {
        Self::with_timeout(Duration::from_secs(60)).await
    }

    async fn with_timeout(timeout: Duration) -> Self {
        let stage = stage().await;
        let port = stage.devnet.serve("127.0.0.1:0").await.unwrap();
        let proxy = RpcProxy::start(port.url().to_string()).await;
        let facilitator = OnchainFacilitator::builder()
            .network(stage.devnet.network())
            .rpc_url(proxy.url())
            .rpc_timeout(timeout)
            .clock(stage.clock.clone())
            .signer(settlement_key())
            .build()
            .await
            .unwrap();
        proxy.reset();
        Self { stage, proxy, facilitator, _port: port }
    }

    fn payments(&self, count: u64) -> Vec<Prechecked> {
        let key = self.stage.payer(count);
        (0..count).map(|_| self.stage.payment(&key)).collect()
    }

    /// Verifies all at once, and returns how many could be.
    async fn verify(&self, payments: &[Prechecked]) -> usize {
        self.verify_each(payments).await.iter().flatten().count()
    }

    /// Verifies all in one instant of the runtime's time, however long the machine takes to begin.
    async fn verify_each(&self, payments: &[Prechecked]) -> Vec<Result<Verified, VerifyError>> {
        let mut verifying = pin!(join_all(payments.iter().map(|payment| self.facilitator.verify(payment))));
        tokio::time::pause();
        let begun = poll!(&mut verifying);
        tokio::time::resume();
        match begun {
            Poll::Ready(all) => all,
            Poll::Pending => verifying.await,
        }
    }

    /// Sets the outcome of batches, and counts them.
    fn judge_batches(&self, fate: Fate) -> Arc<AtomicUsize> {
        let batches = Arc::new(AtomicUsize::new(0));
        let seen = batches.clone();
        self.proxy.judge(move |methods| match methods.len() {
            0 | 1 => Fate::Pass,
            _ => {
                seen.fetch_add(1, Ordering::SeqCst);
                fate
            }
        });
        batches
    }
}

#[tokio::test]
async fn two_hundred_at_once_share_a_few_requests() {
    let remote = Remote::new().await;
    assert_eq!(remote.verify(&remote.payments(200)).await, 200);
    let counts = remote.proxy.counts();
    assert_eq!(counts.of("eth_call"), 200);
    // The first one alone, and the others by fifty.
    assert_eq!(counts.requests, 5, "{counts:?}");
}

#[tokio::test]
async fn single_call_is_not_batched() {
    let remote = Remote::new().await;
    for payment in remote.payments(5) {
        assert_eq!(remote.verify(&[payment]).await, 1);
    }
    let counts = remote.proxy.counts();
    assert_eq!((counts.requests, counts.of("eth_call")), (5, 5));
}

#[tokio::test]
async fn refused_call_in_a_batch_does_not_affect_others() {
    let remote = Remote::new().await;
    let mut payments = remote.payments(30);
    let used = payments.swap_remove(11);
    remote.stage.front_run(&used);
    payments.insert(17, used);
    let answers = remote.verify_each(&payments).await;
    for (index, answer) in answers.into_iter().enumerate() {
        match (index, answer) {
            (17, Err(VerifyError::Invalid(rejection))) => assert_eq!(rejection.reason, Reason::NonceAlreadyUsed),
            (17, answer) => panic!("{answer:?}"),
            (_, answer) => drop(answer.unwrap()),
        }
    }
}

#[tokio::test]
async fn node_that_refuses_batches_is_asked_one_by_one() {
    for refusal in [Fate::Status(200), Fate::Status(400), Fate::Status(413), Fate::Error(-32600)] {
        let remote = Remote::new().await;
        let batches = remote.judge_batches(refusal);
        assert_eq!(remote.verify(&remote.payments(40)).await, 40, "{refusal:?}");
        let first = batches.load(Ordering::SeqCst);
        assert_eq!(first, 1, "{refusal:?}");
        assert_eq!(remote.verify(&remote.payments(40)).await, 40, "{refusal:?}");
        assert_eq!(batches.load(Ordering::SeqCst), first, "{refusal:?}: it is not asked so again");
    }
}

#[tokio::test]
async fn calls_missing_from_a_batch_are_sent_again() {
    let remote = Remote::new().await;
    remote.judge_batches(Fate::Half);
    assert_eq!(remote.verify(&remote.payments(40)).await, 40);
}

#[tokio::test]
async fn calls_of_a_lost_batch_are_sent_one_by_one_and_the_next_is_a_batch_again() {
    for loss in [Fate::DropBefore, Fate::DropAfter, Fate::Status(502), Fate::Status(429)] {
        let remote = Remote::new().await;
        let batches = remote.judge_batches(loss);
        assert_eq!(remote.verify(&remote.payments(40)).await, 40, "{loss:?}");
        let first = batches.load(Ordering::SeqCst);
        assert_eq!(remote.verify(&remote.payments(40)).await, 40, "{loss:?}");
        assert!(first > 0 && batches.load(Ordering::SeqCst) > first, "{loss:?}");
    }
}

#[tokio::test]
async fn timeout_of_a_batch_fails_all_its_calls() {
    let remote = Remote::with_timeout(Duration::from_millis(300)).await;
    let batches = remote.judge_batches(Fate::Hold);
    let payments = remote.payments(40);
    let mut answers = in_time("the batch is late", remote.verify_each(&payments)).await.into_iter();
    // The first one is asked for alone: the node answers it, unless the machine is busy.
    let _ = answers.next();
    assert_eq!((batches.load(Ordering::SeqCst), answers.len()), (1, 39));
    for answer in answers {
        let error = answer.unwrap_err();
        assert!(matches!(error, VerifyError::Unavailable(FacilitatorError::Unreachable { .. })), "{error:?}");
    }
}

/// The calls of one runtime were to be sent by a task of that runtime, which is gone.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_of_one_runtime_does_not_block_callers_in_another() {
    let remote = Remote::new().await;
    let payments = remote.payments(4);
    let (facilitator, ours) = (remote.facilitator.clone(), payments[..3].to_vec());
    let shut_down = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for payment in ours {
                let facilitator = facilitator.clone();
                tokio::spawn(async move { facilitator.verify(&payment).await });
            }
            // Every call reaches the point where it waits.
            tokio::task::yield_now().await;
        });
    });
    shut_down.join().unwrap();
    in_time("the last one is verified", remote.facilitator.verify(&payments[3])).await.unwrap();
}

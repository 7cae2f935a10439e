//! Sharing JSON-RPC batches between requests that come at about the same time.
//!
//! An HTTP request costs more than most calls in it. So of the requests within a millisecond the first is sent at once, and the others
//! share the next HTTP request, as a JSON-RPC batch. A single call is sent immediately. A node that refuses batches is asked one by one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_json_rpc::{Id, RequestPacket, ResponsePacket, SerializedRequest};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::rpc::{Rpc, RpcFailure, Unanswered, outcome, read};

/// How long after a request the next ones are gathered.
const GATHERING: Duration = Duration::from_millis(1);
/// The most calls in one batch. Providers allow a hundred and more.
const MAX_TOGETHER: usize = 50;
/// The most calls that wait. Further ones are sent alone.
const MAX_WAITING: usize = 1_000;
/// How long a node that refuses batches is asked one by one.
const ONE_BY_ONE: Duration = Duration::from_secs(600);

type Answer = Result<Box<RawValue>, RpcFailure>;

/// Batches requests that change nothing, so that they can be repeated. A clone is the same batcher.
#[derive(Clone)]
pub(crate) struct RpcBatcher(Arc<Inner>);

struct Inner {
    rpc: Rpc,
    gathering: Mutex<Gathering>,
}

#[derive(Default)]
struct Gathering {
    /// The calls of the next batch. If there are any, a task will send them.
    waiting: Vec<Waiting>,
    /// When the last request was sent.
    sent: Option<Instant>,
    /// Until when all calls are sent alone.
    one_by_one: Option<Instant>,
}

struct Waiting {
    request: SerializedRequest,
    answer: oneshot::Sender<Answer>,
}

impl RpcBatcher {
    pub(crate) fn new(rpc: Rpc) -> Self {
        Self(Arc::new(Inner { rpc, gathering: Mutex::default() }))
    }

    /// Sends a request and waits for its result, within the default timeout.
    pub(crate) async fn call<R: DeserializeOwned>(
        &self,
        method: &'static str,
        params: impl Serialize,
    ) -> Result<R, RpcFailure> {
        let request = self.0.rpc.request(method, params)?;
        let answer = match self.join(request) {
            Ok(answer) => answer.await.unwrap_or(Err(RpcFailure::Silent)),
            Err(alone) => self.0.rpc.ask(self.0.rpc.timeout(), alone).await,
        };
        answer.and_then(|result| read(method, &result))
    }

    /// Adds the request to the next batch and returns the receiver of its answer. Gives the request back if it is to be sent alone.
    fn join(&self, request: SerializedRequest) -> Result<oneshot::Receiver<Answer>, SerializedRequest> {
        let now = Instant::now();
        let mut gathering = self.gathering();
        let next = gathering.sent.map(|sent| sent + GATHERING).filter(|next| *next > now);
        let is_alone = gathering.one_by_one.is_some_and(|until| until > now)
            || gathering.waiting.len() >= MAX_WAITING
            || (next.is_none() && gathering.waiting.is_empty());
        if is_alone {
            gathering.sent = Some(now);
            return Err(request);
        }
        let (answer, receiver) = oneshot::channel();
        gathering.waiting.push(Waiting { request, answer });
        let is_first = gathering.waiting.len() == 1;
        drop(gathering);
        if is_first {
            let mut sending = Sending(Some(self.clone()));
            tokio::spawn(async move {
                sleep_until(next.unwrap_or(now)).await;
                if let Some(batcher) = sending.0.take() {
                    batcher.send().await;
                }
            });
        }
        Ok(receiver)
    }

    /// Sends the calls that were gathered.
    async fn send(&self) {
        let mut waiting = {
            let mut gathering = self.gathering();
            gathering.sent = Some(Instant::now());
            std::mem::take(&mut gathering.waiting)
        };
        waiting.retain(|one| !one.answer.is_closed());
        let mut requests = JoinSet::new();
        while !waiting.is_empty() {
            let rest = waiting.split_off(waiting.len().min(MAX_TOGETHER));
            let (batcher, batch) = (self.clone(), std::mem::replace(&mut waiting, rest));
            requests.spawn(async move { batcher.ask(batch).await });
        }
        requests.join_all().await;
    }

    async fn ask(&self, mut batch: Vec<Waiting>) {
        let mut is_refused = false;
        if batch.len() > 1 {
            let packet = RequestPacket::Batch(batch.iter().map(|one| one.request.clone()).collect());
            match self.0.rpc.exchange(self.0.rpc.timeout(), packet).await {
                Ok(ResponsePacket::Batch(responses)) => {
                    is_refused = true;
                    let mut responses: HashMap<Id, _> =
                        responses.into_iter().map(|response| (response.id, response.payload)).collect();
                    // If all are errors, the provider may refuse the batch as too large.
                    if responses.values().any(|payload| payload.is_success()) {
                        let (answered, missing): (Vec<_>, Vec<_>) =
                            batch.into_iter().partition(|one| responses.contains_key(one.request.id()));
                        for one in answered {
                            if let Some(payload) = responses.remove(one.request.id()) {
                                let _ = one.answer.send(outcome(one.request.method(), payload));
                            }
                        }
                        batch = missing;
                    }
                }
                Ok(ResponsePacket::Single(_)) => is_refused = true,
                // The callers have waited long enough.
                Err(Unanswered::Late) => {
                    tracing::debug!(requests = batch.len(), "the node did not answer in time");
                    return batch.into_iter().for_each(|one| drop(one.answer.send(Err(RpcFailure::Silent))));
                }
                Err(unanswered) => {
                    is_refused = unanswered.is_refusal();
                    tracing::debug!(requests = batch.len(), why = unanswered.describe(), "the node did not answer");
                }
            }
        }
        self.ask_one_by_one(batch, is_refused).await;
    }

    /// Sends each call alone, since the failure of the batch may concern none of them. If the batch was refused and a single call is not, the
    /// node refuses batches.
    async fn ask_one_by_one(&self, batch: Vec<Waiting>, is_refused: bool) {
        let mut answers = JoinSet::new();
        for Waiting { request, answer } in batch {
            let batcher = self.clone();
            answers.spawn(async move {
                let rpc = &batcher.0.rpc;
                let result = rpc.ask(rpc.timeout(), request).await;
                // Before the caller has its answer: its next call must not be in a batch.
                if is_refused && result.is_ok() {
                    batcher.go_one_by_one();
                }
                let _ = answer.send(result);
            });
        }
        answers.join_all().await;
    }

    fn go_one_by_one(&self) {
        let now = Instant::now();
        let before = self.gathering().one_by_one.replace(now + ONE_BY_ONE);
        if before.is_none_or(|until| until <= now) {
            tracing::info!("the node refuses batches; it is asked one by one");
        }
    }

    fn gathering(&self) -> MutexGuard<'_, Gathering> {
        self.0.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that will send the batch, until it does. If its runtime is shut down before, callers in other runtimes must not wait for it.
struct Sending(Option<RpcBatcher>);

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(batcher) = self.0.take() {
            batcher.gathering().waiting.clear();
        }
    }
}

debug_fields!(RpcBatcher |this| { waiting: this.gathering().waiting.len() });

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll};

    use alloy_json_rpc::{ErrorPayload, Response, ResponsePayload};
    use alloy_rpc_client::RpcClient;
    use alloy_transport::{TransportError, TransportFut};
    use tower_service::Service;

    use super::*;

    /// A node that answers everything with 1, and counts the calls in each request.
    #[derive(Clone, Default)]
    struct Node {
        packets: Arc<Mutex<Vec<usize>>>,
        refuses_batches: bool,
    }

    impl Service<RequestPacket> for Node {
        type Response = ResponsePacket;
        type Error = TransportError;
        type Future = TransportFut<'static>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, packet: RequestPacket) -> Self::Future {
            self.packets.lock().unwrap().push(packet.len());
            let one = || RawValue::from_string("1".into()).unwrap();
            let answer = match packet {
                RequestPacket::Single(request) => ResponsePacket::Single(Response {
                    id: request.id().clone(),
                    payload: ResponsePayload::Success(one()),
                }),
                RequestPacket::Batch(_) if self.refuses_batches => ResponsePacket::Single(Response {
                    id: Id::None,
                    payload: ResponsePayload::Failure(ErrorPayload::invalid_request()),
                }),
                RequestPacket::Batch(requests) => ResponsePacket::Batch(
                    requests
                        .iter()
                        .map(|request| Response { id: request.id().clone(), payload: ResponsePayload::Success(one()) })
                        .collect(),
                ),
            };
            Box::pin(async move { Ok(answer) })
        }
    }

    impl Node {
        fn batcher(&self) -> RpcBatcher {
            RpcBatcher::new(Rpc::new(RpcClient::new(self.clone(), true), Duration::from_secs(5)))
        }

        /// Returns the number of calls in each request since the last time, sorted.
        fn packets(&self) -> Vec<usize> {
            let mut packets = std::mem::take(&mut *self.packets.lock().unwrap());
            packets.sort_unstable();
            packets
        }
    }

    /// Makes so many calls at once; each is answered.
    async fn ask(batcher: &RpcBatcher, times: usize) {
        let mut asking = JoinSet::new();
        for _ in 0..times {
            let batcher = batcher.clone();
            asking.spawn(async move { batcher.call::<u64>("eth_call", [(); 0]).await });
        }
        for answer in asking.join_all().await {
            assert_eq!(answer.unwrap(), 1);
        }
        // The next call comes alone.
        tokio::time::sleep(2 * GATHERING).await;
    }

    #[tokio::test(start_paused = true)]
    async fn batch_has_at_most_fifty_calls() {
        let node = Node::default();
        let batcher = node.batcher();
        ask(&batcher, 1).await;
        assert_eq!(node.packets(), [1], "a single call is sent immediately");
        ask(&batcher, 120).await;
        assert_eq!(node.packets(), [1, 19, 50, 50]);
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_a_thousand_calls_wait() {
        let node = Node::default();
        let batcher = node.batcher();
        ask(&batcher, 1 + MAX_WAITING + 3).await;
        assert_eq!(node.packets(), [vec![1; 4], vec![MAX_TOGETHER; MAX_WAITING / MAX_TOGETHER]].concat());
    }

    /// Each caller makes its next call as soon as it has its answer.
    #[tokio::test(start_paused = true)]
    async fn refusal_of_batches_is_known_before_any_caller_has_its_answer() {
        let node = Node { refuses_batches: true, ..Node::default() };
        let batcher = node.batcher();
        let mut asking = JoinSet::new();
        for _ in 0..10 {
            let batcher = batcher.clone();
            asking.spawn(async move {
                for _ in 0..2 {
                    batcher.call::<u64>("eth_call", [(); 0]).await.unwrap();
                }
            });
        }
        asking.join_all().await;
        // The first call came alone, and the caller's second one in time for the batch.
        assert_eq!(node.packets(), [vec![1; 20], vec![10]].concat());
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_tried_again_after_ten_minutes() {
        let node = Node { refuses_batches: true, ..Node::default() };
        let batcher = node.batcher();
        ask(&batcher, 10).await;
        assert_eq!(node.packets(), [vec![1; 10], vec![9]].concat());
        ask(&batcher, 10).await;
        assert_eq!(node.packets(), [1; 10]);
        tokio::time::sleep(ONE_BY_ONE).await;
        ask(&batcher, 10).await;
        assert_eq!(node.packets(), [vec![1; 10], vec![9]].concat());
    }
}

//! The core that charges, on a transport that is not HTTP: function calls in one process.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use bytes::Bytes;
use futures_util::{future::join_all, poll};
use http::{HeaderMap, Method};
use serde_json::{Map, Value, json};
use support::eventually::eventually;
use tower_x402::{
    Clock as _, Network, SystemClock, Usdc,
    charge::{Begun, NotOffered, Offer, Refusal, Request, Seller, SettleAnswer, Settler, Sponsor},
    client::{Budget, Payer, PermitPolicy},
    facilitator::{Facilitator, OnchainFacilitator},
    payment::{Prechecked, Terms, Verified, Window, precheck},
    permit2,
    protocol::{
        ExactOffer, Extension, MAX_PAYMENT_HEADER, PaymentFlow, PaymentPayload, PaymentRequired, ResourceInfo,
        SettlementResponse, TransferMethod, Verbatim, decode_header, encode_header,
    },
};
use x402_devnet::Devnet;

const PRICE: u64 = 10_000;
const PAYEE: Address = Address::repeat_byte(7);

/// A function that is sold, on a chain of its own.
struct Oracle {
    devnet: Devnet,
    facilitator: OnchainFacilitator,
    seller: Arc<Seller>,
    offers: Vec<Offer>,
    calls: AtomicUsize,
}

impl Oracle {
    async fn open(change: impl FnOnce(&mut ExactOffer, &OnchainFacilitator)) -> Arc<Self> {
        let devnet = Devnet::start().await.unwrap();
        let key = PrivateKeySigner::random();
        devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        let builder = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client());
        let facilitator = builder.signer(key).build().await.unwrap();
        let seller = Seller::builder("oracle", facilitator.clone()).build();
        let mut offer = ExactOffer::new(devnet.asset(), U256::from(PRICE), PAYEE, seller.max_timeout_seconds());
        change(&mut offer, &facilitator);
        let offers = vec![seller.offer(offer).unwrap()];
        Arc::new(Self { devnet, facilitator, seller, offers, calls: AtomicUsize::new(0) })
    }

    /// A payment by somebody who has the price once.
    async fn pay(&self) -> PaymentPayload {
        let (buyer, asset) = (PrivateKeySigner::random(), self.devnet.asset());
        self.devnet.mint(buyer.address(), Usdc::from_atomic(PRICE)).unwrap();
        self.devnet.execute(buyer.address(), asset.address, permit2::approval(U256::from(PRICE)).to_vec()).unwrap();
        let accepts = self.offers.iter().map(|offer| offer.requirements().clone()).collect();
        let required = PaymentRequired::new(ResourceInfo::new("call:oracle"), accepts);
        let header = encode_header(&required).unwrap().parse().unwrap();
        let headers = HeaderMap::from_iter([("payment-required".parse().unwrap(), header)]);
        let permits = PermitPolicy::default().node(self.devnet.network(), self.devnet.rpc_client());
        let payer = Payer::builder(buyer).budget(Budget::builder().build()).asset(asset).upto(permits).build();
        let url = "call:oracle".parse().unwrap();
        let signed = payer.pay(&Method::POST, &url, &headers, None).await.unwrap().expect("it is payable");
        decode_header(signed.header().as_bytes(), MAX_PAYMENT_HEADER).unwrap()
    }

    async fn begin(&self, question: &str, payment: &PaymentPayload) -> Result<Begun, Refusal> {
        self.begin_with(payment, Request::new(question.to_owned()).with_secret()).await
    }

    async fn begin_with(&self, payment: &PaymentPayload, request: Request) -> Result<Begun, Refusal> {
        self.seller.begin(&self.offers, payment.clone(), &request).await
    }

    /// Answers a question, once for a payment.
    async fn ask(&self, question: &str, payment: &PaymentPayload) -> Result<(Bytes, SettlementResponse), Refusal> {
        match self.begin(question, payment).await? {
            Begun::Work(work) => {
                self.calls.fetch_add(1, Ordering::SeqCst);
                let response = Bytes::from(format!("the answer to {question}"));
                let receipt = work.charge(response.clone()).await?;
                Ok((response, receipt))
            }
            Begun::Replay { response, receipt } => Ok((response, receipt)),
        }
    }

    fn earned(&self) -> u64 {
        self.devnet.balance_of(PAYEE).unwrap().atomic()
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

#[tokio::test]
async fn two_hundred_copies_of_a_call_are_worked_on_once_and_settled_once() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    let copies = join_all((0..200).map(|_| oracle.ask("a", &payment))).await;
    let (response, receipt) = copies[0].as_ref().unwrap();
    assert_eq!(response, "the answer to a");
    assert!(receipt.success && receipt.transaction.starts_with("0x"), "{receipt:?}");
    for copy in &copies {
        assert_eq!(copy.as_ref().unwrap(), &(response.clone(), receipt.clone()));
    }
    assert_eq!((oracle.calls(), oracle.earned()), (1, PRICE));
}

#[tokio::test]
async fn work_that_comes_to_nothing_is_not_charged_and_is_done_again() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it is new") };
    assert_eq!((work.payment().amount, work.payment().attempt), (U256::from(PRICE), 1));
    assert_eq!(work.release().await, None);
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it was released") };
    assert_eq!(work.payment().attempt, 2);
    drop(work);
    assert_eq!(oracle.earned(), 0);
    oracle.ask("a", &payment).await.unwrap();
    assert_eq!((oracle.calls(), oracle.earned()), (1, PRICE));
}

#[tokio::test]
async fn payment_for_one_call_buys_no_other() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    oracle.ask("a", &payment).await.unwrap();
    let refusal = oracle.ask("b", &payment).await.unwrap_err();
    assert_eq!((refusal.code(), refusal.retry_after()), ("payment_already_used", None));
    // Nor of another seller on the same ledger.
    let other = Seller::builder("others", oracle.facilitator.clone()).build();
    let refusal = other.begin(&oracle.offers, payment, &Request::new("a").with_secret()).await.unwrap_err();
    assert_eq!(refusal.code(), "payment_already_used");
    assert_eq!((oracle.calls(), oracle.earned()), (1, PRICE));
}

#[tokio::test]
async fn what_was_paid_before_the_work_is_charged_once_however_often_the_work_fails() {
    let oracle = Oracle::open(|offer, _| offer.flow = PaymentFlow::Upfront).await;
    let payment = oracle.pay().await;
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it is new") };
    assert_eq!(oracle.earned(), PRICE, "paid before the work");
    let receipt = work.release().await.expect("money moved all the same");
    assert!(receipt.success, "{receipt:?}");
    let (_, paid) = oracle.ask("a", &payment).await.unwrap();
    assert_eq!((paid, oracle.earned()), (receipt, PRICE));
}

/// A payment is bound to what its payer added, as to the request.
#[tokio::test]
async fn what_a_payer_adds_to_an_extension_is_told_to_the_work() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    let selling_in = |currency: &str| {
        let tip = Extension::new("tip", json!({ "currency": currency }), json!({}));
        Seller::builder("oracle", oracle.facilitator.clone()).extension(tip).build()
    };
    let seller = selling_in("USD");
    assert_eq!(seller.extensions().unwrap().read().unwrap()["tip"]["info"], json!({ "currency": "USD" }));
    let returned = |info: Value| {
        let tip = Map::from_iter([("tip".to_owned(), json!({ "info": info, "schema": {} }))]);
        let mut payment = payment.clone();
        payment.extensions = Some(Verbatim::of(&tip).unwrap());
        payment
    };
    let begin = async |seller: &Arc<Seller>, payment: PaymentPayload| {
        seller.begin(&oracle.offers, payment, &Request::new("a").with_secret()).await
    };
    let refusal = begin(&seller, returned(json!({ "currency": "EUR" }))).await.unwrap_err();
    assert_eq!(refusal.code(), "extension_echo_mismatch");
    let to_ada = || returned(json!({ "currency": "USD", "for": "Ada" }));
    let Begun::Work(work) = begin(&seller, to_ada()).await.unwrap() else { panic!("it is new") };
    assert_eq!(work.echoed().info("tip").unwrap(), Some(json!({ "currency": "USD", "for": "Ada" })));
    work.charge("done").await.unwrap();
    for other in [returned(json!({ "currency": "USD", "for": "Eve" })), payment.clone()] {
        assert_eq!(begin(&seller, other).await.unwrap_err().code(), "payment_already_used");
    }
    for seller in [seller, selling_in("EUR"), oracle.seller.clone()] {
        let again = begin(&seller, to_ada()).await.unwrap();
        assert!(matches!(again, Begun::Replay { response, .. } if response == "done"), "whatever is declared since");
    }
    assert_eq!(oracle.earned(), PRICE);
}

#[tokio::test]
async fn caller_that_goes_away_gets_its_answer_when_it_comes_back() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it is new") };
    let mut charging = Box::pin(work.charge("done"));
    assert!(poll!(charging.as_mut()).is_pending());
    drop(charging);
    let came_back = || async {
        let Ok(Begun::Replay { response, receipt }) = oracle.begin("a", &payment).await else { return false };
        response == "done" && receipt.success
    };
    eventually("the answer", came_back).await;
    assert_eq!(oracle.earned(), PRICE);
}

#[tokio::test]
async fn permit_is_charged_what_the_work_cost_and_no_more_than_was_signed_for() {
    let permits = |offer: &mut ExactOffer, facilitator: &OnchainFacilitator| {
        let methods = facilitator.permit_methods(Network::BASE_SEPOLIA);
        offer.method = methods.into_iter().find(|method| *method != TransferMethod::Permit).unwrap();
    };
    let oracle = Oracle::open(permits).await;
    let payment = oracle.pay().await;
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it is new") };
    let refusal = work.charge_only(U256::from(PRICE + 1), "too dear").await.unwrap_err();
    assert_eq!((refusal.code(), oracle.earned()), ("internal_error", 0));
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("nothing was charged") };
    let receipt = work.charge_only(U256::from(2_500), "cheap").await.unwrap();
    assert_eq!((receipt.amount.as_deref(), oracle.earned()), (Some("2500"), 2_500));
    let Begun::Replay { response, .. } = oracle.begin("a", &payment).await.unwrap() else { panic!("it is used") };
    assert_eq!(response, "cheap");
}

#[tokio::test]
async fn payment_of_a_fixed_amount_is_charged_that_amount_or_nothing() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payment = oracle.pay().await;
    for other in [PRICE - 1, PRICE + 1] {
        let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("nothing was charged") };
        let refusal = work.charge_only(U256::from(other), "not its price").await.unwrap_err();
        assert_eq!((refusal.code(), oracle.earned()), ("internal_error", 0));
    }
    let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("nothing was charged") };
    let receipt = work.charge_only(U256::from(PRICE), "its price").await.unwrap();
    assert_eq!((receipt.amount, oracle.earned()), (Some(PRICE.to_string()), PRICE));
}

/// If it is not known at once whether the payment was settled, the payer comes back for it.
#[tokio::test]
async fn response_that_is_too_long_to_be_kept_is_not_charged_and_its_payment_is_free_at_once() {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let oracle = Oracle::open(|offer, _| offer.flow = flow).await;
        let payment = oracle.pay().await;
        let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("it is new") };
        let (longest, paid_before) = (work.response_limit(), oracle.earned());
        let refusal = work.charge(vec![7; longest + 1]).await.unwrap_err();
        assert_eq!((refusal.code(), refusal.retry_after()), ("internal_error", None), "{refusal}");
        assert_eq!((refusal.receipt().is_some(), oracle.earned()), (flow == PaymentFlow::Upfront, paid_before));
        let Begun::Work(work) = oracle.begin("a", &payment).await.unwrap() else { panic!("nothing was kept") };
        work.charge(vec![7; longest]).await.unwrap();
        let Begun::Replay { response, .. } = oracle.begin("a", &payment).await.unwrap() else { panic!("it is used") };
        assert_eq!((response.len(), oracle.earned()), (longest, PRICE));
    }
}

/// Whoever reads the payment on the chain can make up the request, too.
#[tokio::test]
async fn response_to_a_request_that_others_can_make_up_is_given_again_three_times() {
    let oracle = Oracle::open(|_, _| {}).await;
    for (request, replays) in [(Request::new("a"), 3), (Request::new("a, and 5d1f").with_secret(), 6)] {
        let payment = oracle.pay().await;
        let Begun::Work(work) = oracle.begin_with(&payment, request.clone()).await.unwrap() else {
            panic!("it is new")
        };
        work.charge("done").await.unwrap();
        for _ in 0..replays {
            let begun = oracle.begin_with(&payment, request.clone()).await.unwrap();
            assert!(matches!(begun, Begun::Replay { response, .. } if response == "done"));
        }
        let again = oracle.begin_with(&payment, request).await;
        assert_eq!(again.err().map(|refusal| refusal.code() == "payment_already_used"), (replays == 3).then_some(true));
    }
}

/// Says how often it was told that a payment is settled.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Sponsor for Counting {
    fn grant(&self, _: &Prechecked, _: &Verified) -> Result<impl Send, Refusal> {
        Ok(())
    }

    fn settled(&self, _: &Prechecked) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn sponsor_is_told_once_of_a_payment_that_is_settled_however_often_that_is_asked_for() {
    let oracle = Oracle::open(|_, _| {}).await;
    let payload = oracle.pay().await.payload.read().unwrap();
    let seconds = oracle.seller.max_timeout_seconds();
    let offer = ExactOffer::new(oracle.devnet.asset(), U256::from(PRICE), PAYEE, seconds);
    let now = SystemClock.now();
    let payment = precheck(Arc::new(Terms::new(offer)), payload, Window::default().skew(30), now).unwrap();
    let facilitator: Arc<dyn Facilitator> = Arc::new(oracle.facilitator.clone());
    let (settler, sponsor) = (Settler::new(Arc::new(SystemClock), 8), Arc::new(Counting::default()));
    let first = settler.settle(&sponsor, &facilitator, &payment).await;
    assert!(matches!(first, SettleAnswer::Settled(_)), "{first:?}");
    assert_eq!(settler.settle(&sponsor, &facilitator, &payment).await, first);
    assert_eq!((sponsor.0.load(Ordering::SeqCst), oracle.earned()), (1, PRICE));
}

#[tokio::test]
async fn offer_that_nobody_settles_or_that_leaves_too_little_time_is_not_made() {
    let oracle = Oracle::open(|_, _| {}).await;
    let offer = |asset, seconds| oracle.seller.offer(ExactOffer::new(asset, U256::from(PRICE), PAYEE, seconds));
    let most = oracle.seller.max_timeout_seconds();
    let base = Network::BASE.usdc().unwrap();
    assert_eq!(offer(base, most).err(), Some(NotOffered::NotServed(Network::BASE)));
    assert_eq!(offer(oracle.devnet.asset(), 60).err(), Some(NotOffered::TooShort { least: 76 }));
    assert!(offer(oracle.devnet.asset(), 76).is_ok());
}

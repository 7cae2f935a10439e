//! A person opens a paid page, presses the button and gets the content: headless Chromium with a wallet that signs with a key of the
//! test, on anvil with Circle's own USDC.

pub(super) mod browser;
mod site;

use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
pub use browser::chromium;
use browser::{Browser, Seen};
use http::{Method, Response};
use serde_json::{Value, json};
use site::Site;
use support::{
    anvil::AnvilChain,
    authorization::random_address,
    chain::{Chain, Transfer},
    rpc_proxy::{Fate, RpcProxy},
    shop::{Customer, PRICE, Shop},
};
use tower_x402::{
    Network,
    protocol::PaymentFlow,
    server::{BrowserPage, RequirePaymentLayerBuilder},
};

const ESSAY: &str = r#"{"title":"On paying","words":["one","two"]}"#;

/// A chain, a site that sells essays, and a person with the money for a hundred.
struct Scene {
    chain: AnvilChain,
    /// The proxy between the seller and its node.
    proxy: RpcProxy,
    shop: Shop,
    site: Site,
    person: Customer,
    browser: Browser,
}

impl Scene {
    async fn set(describe: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        Self::with_answer(describe, 200, "application/json", ESSAY).await
    }

    async fn with_answer(
        describe: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
        status: u16,
        kind: &'static str,
        body: impl Into<axum::body::Bytes>,
    ) -> Self {
        let chain = AnvilChain::start(None).await;
        let proxy = RpcProxy::start(chain.rpc_url()).await;
        let shop = Shop::open_at(&chain, proxy.url()).await;
        let body = body.into();
        let layer = shop.layer().service_name("Essays").description("One essay a day, by the essay.");
        let app = shop.app_with(describe(layer), move |_, _| {
            let response = Response::builder().status(status).header("content-type", kind);
            let response = response.body(Body::from(body.clone()));
            async move { Ok(response?) }
        });
        let site = Site::open(app).await;
        let person = Customer::with_funds(&chain, 100 * PRICE).await;
        let browser = Browser::start(&person.signer, &chain.rpc_url()).await;
        Self { chain, proxy, shop, site, person, browser }
    }

    /// Opens the essay.
    async fn open(&mut self) -> Seen {
        self.browser.open(&self.site.url("localhost", "/essay?page=2")).await
    }

    async fn transfers(&self) -> Vec<Transfer> {
        self.chain.token_transfers(self.shop.pay_to).await
    }

    /// Checks that there is one transfer of the price, that the page's receipt names it, that the handler ran once, and that the essay is shown.
    async fn was_bought_once(&self, seen: &Seen) {
        let transfers = self.transfers().await;
        let [Transfer { transaction, from, units }] = transfers[..] else { panic!("{transfers:?}, {seen:?}") };
        assert_eq!((from, units, self.shop.handled()), (self.person.from, PRICE, 1));
        assert_eq!((seen.told(), seen.mood.as_deref()), ("Paid and settled.", Some("done")), "{seen:?}");
        let receipt = seen.receipt.as_deref().unwrap();
        for part in [transaction.to_string(), from.to_string(), self.shop.pay_to.to_string()] {
            assert!(receipt.contains(&part), "{part} in {receipt}");
        }
        assert_eq!((seen.kept, seen.focused.as_deref()), (0, Some("answer")), "{seen:?}");
        assert_eq!(seen.button.as_deref(), Some("Pay 0.001 USDC again"), "for the next one");
    }

    /// Checks that no money moved and no handler ran.
    async fn was_not_bought(&self) {
        assert_eq!((self.transfers().await, self.shop.handled()), (vec![], 0));
    }

    /// Puts both clocks beyond the validity of everything that was signed.
    async fn wait_until_it_is_over(&mut self) {
        self.browser.ahead(600).await;
        self.chain.set_next_timestamp(self.chain.timestamp().await + 600).await;
        self.chain.mine().await;
    }
}

/// Over plain HTTP, where browsers give scripts fewer APIs.
#[tokio::test]
async fn a_person_reads_what_it_costs_and_pays_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    let url = scene.site.url("essays.example", "/essay?page=2");
    let seen = scene.browser.open(&format!("{url}#part")).await;
    assert!(!seen.is_secure && seen.asked.is_empty(), "nothing is asked of a wallet before the button is pressed");
    assert_eq!((seen.title.as_str(), seen.address.as_deref()), ("Essays – payment required", Some(&*url)));
    let [offer] = &seen.offers[..] else { panic!("{seen:?}") };
    for part in ["0.001 USDC", "Base Sepolia", &scene.shop.pay_to.to_string(), "120 seconds"] {
        assert!(offer.contains(part), "{part} in {offer}");
    }
    for (name, width, dark) in [
        ("desktop.png", 1100, false),
        ("desktop-dark.png", 1100, true),
        ("phone.png", 375, false),
        ("phone-dark.png", 375, true),
    ] {
        assert!(!scene.browser.picture(name, width, dark).await.overflows, "{name} fits its width");
    }

    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
    let answer = seen.answer.as_deref().unwrap();
    assert!(answer.contains("\"title\": \"On paying\"") && answer.contains("Save essay"), "{answer}");
    // Exactly the shown offer was signed.
    let [signed] = &seen.signed()[..] else { panic!("{seen:?}") };
    assert_eq!(signed["primaryType"], "TransferWithAuthorization");
    assert_eq!(signed["message"]["value"], PRICE.to_string());
    assert_eq!(signed["message"]["to"], scene.shop.pay_to.to_string());
    assert_eq!(signed["domain"]["verifyingContract"], scene.shop.asset.address.to_string());
    let time = |name: &str| signed["message"][name].as_str().unwrap().parse::<u64>().unwrap();
    assert_eq!(time("validBefore") - time("validAfter"), 600 + 120);
    assert!(seen.methods().iter().all(|method| !method.starts_with("eth_send")), "{seen:?}");
    scene.browser.picture("paid.png", 1100, false).await;
    assert!(!scene.browser.picture("paid-phone.png", 375, true).await.overflows);
}

#[tokio::test]
async fn a_person_pays_upfront_on_anvil() {
    let page = BrowserPage::new().methods([Method::GET]);
    let mut scene = Scene::set(|layer| layer.flow(PaymentFlow::Upfront).browser_page(Some(page))).await;
    let seen = scene.open().await;
    assert!(seen.offers[0].contains("Before the work"));
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
}

#[tokio::test]
async fn the_chosen_offer_is_the_one_that_is_signed_on_anvil() {
    let other = random_address();
    let mut scene = Scene::set(|layer| {
        let usdc = Network::BASE_SEPOLIA.usdc().unwrap();
        layer.pay_to_in(usdc, other).flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization)
    })
    .await;
    let seen = scene.open().await;
    assert_eq!(seen.offers.len(), 4);
    let is_upfront: Vec<bool> = seen.offers.iter().map(|offer| offer.contains("Before the work")).collect();
    assert_eq!(is_upfront, [true, true, false, false], "the first two cannot be chosen: a GET may not be answered");
    scene.browser.choose(3).await;
    assert!(!scene.browser.picture("choice.png", 1100, false).await.overflows);
    let seen = scene.browser.press().await;
    assert_eq!(seen.signed()[0]["message"]["to"], other.to_string(), "{seen:?}");
    assert_eq!((scene.chain.token_transfers(other).await.len(), scene.transfers().await.len()), (1, 0));
}

#[tokio::test]
async fn a_person_who_declines_has_paid_nothing_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    for method in ["eth_requestAccounts", "eth_signTypedData_v4"] {
        scene.browser.wallet(json!({ "declines": [method] })).await;
        let seen = scene.browser.press().await;
        assert_eq!(
            (seen.told(), seen.mood.as_deref()),
            ("You declined in the wallet. Nothing was paid.", Some("problem"))
        );
        assert_eq!((seen.kept, seen.button.as_deref()), (0, Some("Pay 0.001 USDC")));
    }
    scene.was_not_bought().await;
    assert!(scene.site.payments().is_empty());
    scene.browser.wallet(json!({ "declines": [] })).await;
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
}

#[tokio::test]
async fn a_wallet_on_another_chain_is_asked_to_change_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.browser.wallet(json!({ "chain": "0x1", "knows": ["0x1"], "declines": ["wallet_addEthereumChain"] })).await;
    let seen = scene.browser.press().await;
    assert_eq!(seen.told(), "You declined in the wallet. Nothing was paid.");
    assert!(seen.signed().is_empty(), "nothing is signed for another chain");
    scene.was_not_bought().await;

    scene.browser.wallet(json!({ "declines": [] })).await;
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
    let changes: Vec<_> =
        seen.asked.iter().filter(|asked| asked["method"].as_str().unwrap().starts_with("wallet_")).collect();
    let methods: Vec<_> = changes.iter().map(|asked| asked["method"].as_str().unwrap()).collect();
    assert_eq!(methods, ["wallet_switchEthereumChain", "wallet_addEthereumChain", "wallet_switchEthereumChain"]);
    assert_eq!(changes[1]["params"][0]["chainName"], "Base Sepolia");
}

#[tokio::test]
async fn a_person_without_a_wallet_is_told_what_to_do_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.browser.wallet(json!({ "isThere": false })).await;
    let seen = scene.browser.reload().await;
    assert_eq!(seen.button.as_deref(), Some("Pay 0.001 USDC"));
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("There is no wallet in this browser. Install a wallet"), "{seen:?}");
    assert_eq!((seen.mood.as_deref(), seen.kept, seen.focused.as_deref()), (Some("problem"), 0, Some("pay")));
    scene.was_not_bought().await;
    // Some wallets do not set window.ethereum.
    scene.browser.wallet(json!({ "isThere": "announced" })).await;
    scene.browser.reload().await;
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
}

#[tokio::test]
async fn a_person_who_cannot_afford_it_signs_nothing_on_anvil() {
    let mut scene = Scene::set(|layer| layer.price("$1")).await;
    scene.open().await;
    let seen = scene.browser.press().await;
    assert!(seen.told().contains("does not hold enough of the token"), "{seen:?}");
    assert!(seen.signed().is_empty());
    scene.was_not_bought().await;
}

/// A signed payment is presented until it is answered, also after a reload, and no second one is signed.
#[tokio::test]
async fn a_lost_answer_is_asked_for_again_and_not_paid_again_on_anvil() {
    let mut scene = Scene::set(|layer| layer.payment_identifier(true)).await;
    scene.open().await;
    scene.site.trouble.loses.store(true, Ordering::SeqCst);
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("The answer did not arrive.") && seen.signed().len() == 1, "{seen:?}");
    assert_eq!((seen.kept, seen.button.as_deref(), seen.answer), (1, Some("Ask again"), None));

    let seen = scene.browser.reload().await;
    assert!(seen.told().starts_with("A payment was signed here and not answered yet."), "{seen:?}");
    assert_eq!(seen.button.as_deref(), Some("Ask again"));
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("The answer did not arrive.") && seen.asked.is_empty(), "{seen:?}");
    scene.site.trouble.loses.store(false, Ordering::SeqCst);
    let seen = scene.browser.press().await;
    assert!(seen.asked.is_empty(), "the wallet is not asked again: {seen:?}");
    scene.was_bought_once(&seen).await;
    let payments = scene.site.payments();
    assert!(payments.len() >= 3 && payments.iter().all(|payment| *payment == payments[0]), "the same one");
    let payment: Value = serde_json::from_slice(&BASE64_STANDARD.decode(&payments[0]).unwrap()).unwrap();
    let id = &payment["extensions"]["payment-identifier"]["info"]["id"];
    assert!(id.as_str().is_some_and(|id| id.len() == 68), "only who has the id gets the answer again: {payment}");
    // An answered payment is dropped; the next one is new.
    assert_eq!(scene.browser.reload().await.button.as_deref(), Some("Pay 0.001 USDC"));
}

#[tokio::test]
async fn a_busy_seller_is_asked_again_with_the_same_payment_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.site.trouble.is_busy.store(true, Ordering::SeqCst);
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("No answer yet (503 busy).\nNothing was charged"), "{seen:?}");
    assert_eq!((seen.kept, seen.button.as_deref()), (1, Some("Ask again")));
    scene.site.trouble.is_busy.store(false, Ordering::SeqCst);
    let seen = scene.browser.press().await;
    assert!(seen.asked.is_empty(), "{seen:?}");
    scene.was_bought_once(&seen).await;
}

/// The transaction was sent, and the node cannot be reached any more.
#[tokio::test]
async fn an_outcome_that_is_not_known_is_asked_for_until_it_is_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    let sent = AtomicBool::new(false);
    scene.proxy.judge(move |methods| {
        let sends = methods.iter().any(|method| method.starts_with("eth_sendRaw"));
        match (sent.fetch_or(sends, Ordering::SeqCst), sends) {
            (false, false) => Fate::Pass,
            (false, true) => Fate::DropAfter,
            (true, _) => Fate::DropBefore,
        }
    });
    for _ in 0..2 {
        let seen = scene.browser.press().await;
        assert!(seen.told().starts_with("No answer yet (503 settlement_pending)."), "{seen:?}");
        assert_eq!((seen.kept, seen.button.as_deref(), seen.answer), (1, Some("Ask again"), None));
    }
    scene.proxy.judge(|_| Fate::Pass);
    let seen = scene.browser.press().await;
    assert!(seen.asked.is_empty(), "nothing is signed again: {seen:?}");
    scene.was_bought_once(&seen).await;
}

/// Only the chain can show that a payment expired unused.
#[tokio::test]
async fn expired_unused_payment_is_dropped_and_a_used_one_is_kept_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.site.trouble.is_busy.store(true, Ordering::SeqCst);
    scene.browser.press().await;
    // The browser's own clock proves nothing.
    scene.browser.ahead(600).await;
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("No answer yet") && seen.kept == 1, "{seen:?}");
    scene.wait_until_it_is_over().await;
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("What you signed before ended unused"), "{seen:?}");
    assert_eq!((seen.kept, seen.button.as_deref(), seen.signed().len()), (0, Some("Pay 0.001 USDC"), 0));
    scene.was_not_bought().await;

    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.site.trouble.loses.store(true, Ordering::SeqCst);
    scene.browser.press().await;
    scene.site.trouble.loses.store(false, Ordering::SeqCst);
    scene.wait_until_it_is_over().await;
    let seen = scene.browser.press().await;
    assert!(seen.signed().is_empty(), "what was paid is asked for: {seen:?}");
    scene.was_bought_once(&seen).await;
}

/// The clock of the person's machine is wrong: the payment is refused and not charged, and the page says why.
#[tokio::test]
async fn a_refused_payment_is_explained_and_not_replaced_on_anvil() {
    let mut scene = Scene::set(|layer| layer).await;
    scene.open().await;
    scene.browser.ahead(300).await;
    let seen = scene.browser.press().await;
    assert!(
        seen.told().starts_with("The seller declined (402 invalid_exact_evm_payload_authorization_valid_before)."),
        "{seen:?}"
    );
    assert_eq!((seen.kept, seen.button.as_deref(), seen.mood.as_deref()), (1, Some("Ask again"), Some("problem")));
    scene.browser.picture("declined.png", 375, true).await;
    let seen = scene.browser.press().await;
    assert!(seen.signed().is_empty(), "the first one is not proven dead: {seen:?}");
    scene.was_not_bought().await;
}

/// A route that answers POST only: in the flow `authorization` nothing is charged.
#[tokio::test]
async fn failed_answer_is_not_charged_on_anvil() {
    let mut scene = Scene::with_answer(|layer| layer, 405, "text/plain", "POST only").await;
    scene.open().await;
    let seen = scene.browser.press().await;
    assert!(seen.told().starts_with("The seller declined (405"), "{seen:?}");
    assert_eq!((scene.transfers().await, scene.shop.handled(), seen.answer), (vec![], 1, None));
}

#[tokio::test]
async fn a_bought_page_is_shown_and_can_do_nothing_on_anvil() {
    const PAGE: &str =
        "<h1>Bought</h1><script>parent.document.title = 'taken'; alert(1)</script><img src=x onerror=alert(2)>";
    let mut scene = Scene::with_answer(|layer| layer, 200, "text/html; charset=utf-8", PAGE).await;
    scene.open().await;
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
    assert_eq!(seen.title, "Essays – payment required");
    let frame = seen.frame.as_ref().unwrap();
    assert_eq!(frame["sandbox"], "");
    assert!(frame["html"].as_str().unwrap().contains("<h1>Bought</h1>"), "{frame}");
}

#[tokio::test]
async fn a_bought_picture_is_shown_on_anvil() {
    const DOT: &str =
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    let picture = BASE64_STANDARD.decode(DOT).unwrap();
    let mut scene = Scene::with_answer(|layer| layer, 200, "image/png", picture).await;
    scene.open().await;
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
    assert_eq!(seen.image, Some(1));
}

/// Texts of the seller and of the link's author, in a real browser.
#[tokio::test]
async fn hostile_texts_run_no_script_in_a_browser_on_anvil() {
    let evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)><svg/onload=alert(3)>";
    let mut scene = Scene::set(|layer| layer.description(evil).service_name(evil)).await;
    let url = scene.site.url("localhost", "/a\"b'<script>alert(4)</script>?q=\"><script>alert(5)</script>'`");
    let seen = scene.browser.open(&url).await;
    assert_eq!(seen.title, format!("{evil} – payment required"));
    let seen = scene.browser.press().await;
    scene.was_bought_once(&seen).await;
}

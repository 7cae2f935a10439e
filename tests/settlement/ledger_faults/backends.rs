//! Real failures of the ledgers' stores (full, deleted, read-only, disconnected), seen through the layer: answers are true, and no payment
//! is charged twice.

use std::{
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use tower::{BoxError, Layer as _};
use tower_x402::{
    Network, Usdc,
    facilitator::OnchainFacilitator,
    ledger::{Ledger, LedgerError, SqliteLedger},
    protocol::PaymentFlow,
    server::{RequestBody, RequirePaymentLayer},
};
use x402_devnet::Devnet;

use support::{
    shop::{Answer, App, Customer, PRICE, Purchase, app, evaluate, send},
    sqlite_file,
};

const PAYEE: Address = Address::repeat_byte(0xba);

/// A seller on a chain, with a ledger.
struct Shop {
    devnet: Devnet,
    app: App,
    handled: Arc<AtomicU64>,
}

impl Shop {
    async fn open(devnet: &Devnet, ledger: Arc<dyn Ledger>, flow: PaymentFlow) -> Self {
        Self::open_with(devnet, ledger, flow, || {}).await
    }

    /// Opens the seller, and calls `during` while the handler runs.
    async fn open_with(
        devnet: &Devnet,
        ledger: Arc<dyn Ledger>,
        flow: PaymentFlow,
        during: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Self {
        let key = PrivateKeySigner::from_bytes(&B256::repeat_byte(0x5e)).unwrap();
        devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        let facilitator = OnchainFacilitator::builder()
            .network(devnet.network())
            .client(devnet.rpc_client())
            .signer(key)
            .ledger(ledger)
            .build()
            .await
            .unwrap();
        let layer = RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(Network::BASE_SEPOLIA, PAYEE)
            .facilitator(facilitator)
            .flow(flow)
            .max_wait(Duration::from_secs(1))
            .build()
            .unwrap();
        let handled = Arc::<AtomicU64>::default();
        let counter = handled.clone();
        let handler = tower::service_fn(move |request: Request<RequestBody<Body>>| {
            let (counter, during) = (counter.clone(), during.clone());
            async move {
                counter.fetch_add(1, Ordering::SeqCst);
                let body = request.into_body().collect().await?.to_bytes();
                during();
                Ok::<_, BoxError>(Response::new(Body::from(body)))
            }
        });
        Self { devnet: devnet.clone(), app: app(layer.layer(handler)), handled }
    }

    async fn pay(&self) -> Purchase {
        let signer = PrivateKeySigner::random();
        self.devnet.mint(signer.address(), Usdc::from_atomic(PRICE)).unwrap();
        let customer = Customer { from: signer.address(), signer };
        customer.pay(&self.app, evaluate("x")).await
    }

    async fn present(&self, purchase: &Purchase) -> Answer {
        send(&self.app, purchase.on(evaluate("x"))).await
    }

    /// Presents a payment until the answer is no 503.
    async fn insist(&self, purchase: &Purchase) -> Answer {
        for _ in 0..100 {
            let answer = self.present(purchase).await;
            if answer.status != StatusCode::SERVICE_UNAVAILABLE {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("there is no answer");
    }

    fn handled(&self) -> u64 {
        self.handled.load(Ordering::SeqCst)
    }

    /// Returns the number of payments that the payee received.
    fn received(&self) -> u64 {
        self.devnet.balance_of(PAYEE).unwrap().atomic() / PRICE
    }

    /// Checks that the payment buys an answer and is charged once.
    async fn sells(&self, purchase: &Purchase) {
        let answer = self.insist(purchase).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"), "{answer:?}");
        assert!(self.is_paid_by(answer.transaction()).await, "{answer:?}");
    }

    async fn is_paid_by(&self, transaction: B256) -> bool {
        let receipt = self.devnet.provider().get_transaction_receipt(transaction).await.unwrap();
        receipt.is_some_and(|receipt| receipt.status())
    }
}

/// Checks for 503 `ledger_unavailable`: nothing is charged, and `Retry-After` is set.
fn is_refused_before_work(answer: &Answer) {
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "ledger_unavailable"));
    assert!(answer.json()["detail"].as_str().unwrap().contains("nothing was charged by this request"), "{answer:?}");
    assert!(answer.headers.contains_key("retry-after") && answer.settlement().is_none(), "{answer:?}");
}

/// Checks for 503 `settlement_pending`: the outcome is unknown.
fn is_left_open(answer: &Answer) {
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    assert!(!answer.json()["detail"].as_str().unwrap().contains("nothing was charged"), "{answer:?}");
    assert_eq!(answer.settlement().unwrap()["errorReason"], "settlement_pending");
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
}

/// The handler starts before the ledger's write is known to have failed, because nothing waits for the file until the work is done.
fn is_refused_before_work_or_left_open(answer: &Answer, worked: u64) {
    match worked {
        0 => is_refused_before_work(answer),
        _ => is_left_open(answer),
    }
}

/// Checks for a 503 that names the transaction: the payment settled and could not be recorded.
fn is_paid_for_and_not_recorded(answer: &Answer) -> B256 {
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "ledger_unavailable"));
    let said = answer.json();
    let detail = said["detail"].as_str().unwrap();
    assert!(detail.contains("could not be recorded") && detail.contains("it is paid for"), "{answer:?}");
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
    assert_eq!(said["transaction"], answer.transaction().to_string());
    answer.transaction()
}

async fn sqlite(path: &Path) -> Arc<SqliteLedger> {
    Arc::new(SqliteLedger::open(path).await.unwrap())
}

/// Opens a file in which every write of `table` fails that matches `when`.
async fn full_file(path: &Path, table: &str, when: &str) {
    sqlite(path).await.close().await;
    let fail = "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END";
    sqlite_file::change(path, &format!("CREATE TRIGGER full BEFORE INSERT ON {table} WHEN {when} {fail}"));
}

fn make_room(path: &Path) {
    sqlite_file::change(path, "DROP TRIGGER full");
}

#[tokio::test]
async fn full_file_is_reported_before_work_and_settlement() {
    let directory = tempfile::tempdir().unwrap();
    for flow in [PaymentFlow::Upfront, PaymentFlow::Authorization] {
        let path = directory.path().join(format!("{flow:?}.sqlite"));
        let devnet = Devnet::start().await.unwrap();
        full_file(&path, "payments", "TRUE").await;
        let ledger = sqlite(&path).await;
        let shop = Shop::open(&devnet, ledger.clone(), flow).await;
        let first = shop.pay().await;
        let answer = shop.present(&first).await;
        let worked = shop.handled();
        is_refused_before_work_or_left_open(&answer, worked);
        assert!(flow == PaymentFlow::Authorization || worked == 0);
        for purchase in [first.clone(), shop.pay().await] {
            is_refused_before_work(&shop.present(&purchase).await);
        }
        assert_eq!((shop.handled(), shop.received()), (worked, 0), "{flow:?}");
        ledger.close().await;

        make_room(&path);
        let shop = Shop::open(&devnet, sqlite(&path).await, flow).await;
        shop.sells(&first).await;
        assert_eq!(shop.received(), 1);
    }
}

#[tokio::test]
async fn settled_payment_that_cannot_be_recorded_is_reported_with_its_transaction() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let devnet = Devnet::start().await.unwrap();
    full_file(&path, "progress", "NEW.record ->> '$.fulfilment' = 'working'").await;
    let ledger = sqlite(&path).await;
    let shop = Shop::open(&devnet, ledger.clone(), PaymentFlow::Upfront).await;
    let purchase = shop.pay().await;
    let transaction = is_paid_for_and_not_recorded(&shop.present(&purchase).await);
    assert!(shop.is_paid_by(transaction).await);
    assert_eq!((shop.handled(), shop.received()), (0, 1));
    is_refused_before_work(&shop.present(&purchase).await);
    ledger.close().await;

    make_room(&path);
    let shop = Shop::open(&devnet, sqlite(&path).await, PaymentFlow::Upfront).await;
    shop.sells(&purchase).await;
    assert_eq!((shop.handled(), shop.received()), (1, 1), "nothing more is charged");
    assert_eq!(shop.present(&purchase).await.transaction(), transaction);
}

#[tokio::test]
async fn paid_work_that_cannot_be_recorded_is_reported_with_its_transaction() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let devnet = Devnet::start().await.unwrap();
    full_file(&path, "progress", "NEW.record ->> '$.fulfilment' = 'produced'").await;
    let ledger = sqlite(&path).await;
    let shop = Shop::open(&devnet, ledger.clone(), PaymentFlow::Upfront).await;
    let purchase = shop.pay().await;
    is_paid_for_and_not_recorded(&shop.present(&purchase).await);
    assert_eq!((shop.handled(), shop.received()), (1, 1));
    ledger.close().await;

    make_room(&path);
    let shop = Shop::open(&devnet, sqlite(&path).await, PaymentFlow::Upfront).await;
    shop.sells(&purchase).await;
    assert_eq!(shop.received(), 1, "nothing more is charged");
}

/// The file is deleted while the process has it open, so its writes go to an unlinked file.
#[tokio::test]
async fn deleted_file_costs_no_money() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let devnet = Devnet::start().await.unwrap();
    let ledger = sqlite(&path).await;
    let shop = Shop::open(&devnet, ledger.clone(), PaymentFlow::Authorization).await;
    let first = shop.pay().await;
    shop.sells(&first).await;
    std::fs::remove_dir_all(directory.path()).unwrap();
    let second = shop.pay().await;
    shop.sells(&second).await;
    assert_eq!((shop.handled(), shop.received()), (2, 2));
    ledger.close().await;

    std::fs::create_dir(directory.path()).unwrap();
    let shop = Shop::open(&devnet, sqlite(&path).await, PaymentFlow::Authorization).await;
    for purchase in [first, second] {
        let answer = shop.present(&purchase).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED);
        assert_eq!(answer.reason(), "invalid_exact_evm_nonce_already_used", "and not that it failed");
    }
    assert_eq!((shop.handled(), shop.received()), (0, 2), "who does not know of it does no work for it");
}

#[tokio::test]
async fn ledger_in_a_read_only_directory_is_not_opened() {
    for path in ["/proc/x402/ledger.sqlite", "/proc/x402.sqlite", "/proc/version"] {
        let opened = SqliteLedger::open(path).await;
        assert!(matches!(opened, Err(LedgerError::Backend(_))), "{path}");
    }
}

/// Limits the size of files that this process may write, in bytes; `None` removes the limit.
#[cfg(target_os = "linux")]
fn limit_files(bytes: Option<u64>) {
    let limit = bytes.map_or("unlimited".to_owned(), |bytes| bytes.to_string());
    let pid = std::process::id().to_string();
    let limited = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={limit}:unlimited")]).status();
    assert!(limited.expect("prlimit is installed (util-linux)").success());
}

/// The test below runs this in a process of its own.
#[cfg(target_os = "linux")]
#[ignore = "limits the files of its process"]
#[tokio::test]
async fn process_without_room() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let devnet = Devnet::start().await.unwrap();
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let ledger = sqlite(&path).await;
        let shop = Shop::open(&devnet, ledger.clone(), flow).await;
        let before = shop.received();
        shop.sells(&shop.pay().await).await;
        limit_files(Some(4_096));
        let lost = shop.pay().await;
        let answer = shop.present(&lost).await;
        let worked = shop.handled();
        is_refused_before_work_or_left_open(&answer, worked - 1);
        assert!(flow == PaymentFlow::Authorization || worked == 1);
        is_refused_before_work(&shop.present(&lost).await);
        is_refused_before_work(&shop.present(&shop.pay().await).await);
        assert_eq!((shop.handled(), shop.received()), (worked, before + 1));
        ledger.close().await;
        limit_files(None);
        let ledger = sqlite(&path).await;
        let shop = Shop::open(&devnet, ledger.clone(), flow).await;
        shop.sells(&lost).await;
        assert_eq!(shop.received(), before + 2);
        ledger.close().await;
    }
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_is_reported_and_nothing_is_lost_once_there_is_room() {
    let program = std::env::current_exe().unwrap();
    let name = concat!(module_path!(), "::process_without_room");
    let name = name.split_once("::").unwrap().1;
    // A write beyond the limit must fail, not end the process with SIGXFSZ.
    let output = Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#])
        .arg(program)
        .args(["--exact", name, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{failed}");
}

#[cfg(feature = "test-postgres")]
mod postgres {
    use tokio::task::block_in_place;
    use tower_x402::ledger::PostgresLedger;

    use super::*;
    use support::postgres::Server;

    async fn ledger(server: &Server) -> Arc<dyn Ledger> {
        Arc::new(PostgresLedger::builder(server.url()).schema("faults").connect().await.unwrap())
    }

    /// An event that happens once, while the handler runs.
    fn once(event: impl FnOnce() + Send + 'static) -> impl Fn() + Clone + Send + Sync + 'static {
        let event = Arc::new(std::sync::Mutex::new(Some(event)));
        move || {
            if let Some(event) = event.lock().unwrap().take() {
                block_in_place(event);
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn lost_database_is_reported_before_work_and_settlement() {
        let server = Server::start();
        let devnet = Devnet::start().await.unwrap();
        let ledger = ledger(&server).await;
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            let shop = Shop::open(&devnet, ledger.clone(), flow).await;
            let before = shop.received();
            let purchase = shop.pay().await;
            block_in_place(|| server.kill());
            is_refused_before_work(&shop.present(&purchase).await);
            assert_eq!((shop.handled(), shop.received()), (0, before));
            block_in_place(|| server.start_again());
            shop.sells(&purchase).await;
            assert_eq!((shop.handled(), shop.received()), (1, before + 1));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn database_lost_during_work_makes_the_outcome_unknown() {
        goes_away_during_the_work(PaymentFlow::Authorization, is_left_open).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn database_lost_during_paid_work_is_reported_with_the_transaction() {
        goes_away_during_the_work(PaymentFlow::Upfront, |answer| {
            is_paid_for_and_not_recorded(answer);
        })
        .await;
    }

    async fn goes_away_during_the_work(flow: PaymentFlow, is_told: impl Fn(&Answer)) {
        let server = Arc::new(Server::start());
        let devnet = Devnet::start().await.unwrap();
        let killed = server.clone();
        let ledger = ledger(&server).await;
        let shop = Shop::open_with(&devnet, ledger, flow, once(move || killed.kill())).await;
        let purchase = shop.pay().await;
        is_told(&shop.present(&purchase).await);
        assert_eq!(shop.received(), u64::from(flow == PaymentFlow::Upfront));
        block_in_place(|| server.start_again());
        // Its lease may have to end first; the answer says so, too.
        let again = shop.insist(&purchase).await;
        match again.status {
            StatusCode::OK => assert_eq!(shop.received(), 1),
            status => assert_eq!((status, again.reason().as_str()), (StatusCode::CONFLICT, "payment_in_progress")),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn database_restart_during_work_is_invisible_to_the_client() {
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            let server = Arc::new(Server::start());
            let devnet = Devnet::start().await.unwrap();
            let restarted = server.clone();
            let ledger = ledger(&server).await;
            let shop = Shop::open_with(&devnet, ledger, flow, once(move || restarted.restart())).await;
            let purchase = shop.pay().await;
            let answer = shop.present(&purchase).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"), "{answer:?}");
            assert_eq!((shop.handled(), shop.received()), (1, 1));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn read_only_database_is_reported_before_work_and_settlement() {
        let server = Server::start();
        let devnet = Devnet::start().await.unwrap();
        let ledger = ledger(&server).await;
        // A default that does not affect the ledger's connections.
        block_in_place(|| server.set("default_transaction_read_only", "on"));
        let shop = Shop::open(&devnet, ledger.clone(), PaymentFlow::Authorization).await;
        shop.sells(&shop.pay().await).await;
        block_in_place(|| server.make_standby());
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            let shop = Shop::open(&devnet, ledger.clone(), flow).await;
            let purchase = shop.pay().await;
            is_refused_before_work(&shop.present(&purchase).await);
            assert_eq!((shop.handled(), shop.received()), (0, 1));
        }
        block_in_place(|| server.promote());
        shop.sells(&shop.pay().await).await;
        assert_eq!(shop.received(), 2);
    }
}

//! A site that sells, and faults between it and a browser.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use axum::body::Body;
use http::{Request, Response, header::RETRY_AFTER};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, task::JoinHandle};
use tower::{BoxError, ServiceExt};

use support::shop::App;

/// The fault of the next payments.
#[derive(Debug, Default)]
pub struct Trouble {
    /// They are served, and their answers are lost. Chromium retries once by itself before it reports an error.
    pub loses: AtomicBool,
    /// They are refused before the seller sees them.
    pub is_busy: AtomicBool,
}

/// Serves on a port of this machine until it is dropped.
pub struct Site {
    port: u16,
    pub trouble: Arc<Trouble>,
    payments: Arc<Mutex<Vec<String>>>,
    serving: JoinHandle<()>,
}

impl Site {
    pub async fn open(app: App) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let trouble = Arc::<Trouble>::default();
        let payments = Arc::<Mutex<Vec<String>>>::default();
        let (between, seen) = (trouble.clone(), payments.clone());
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (app, trouble, payments) = (app.clone(), between.clone(), seen.clone());
                let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
                    answer(app.clone(), trouble.clone(), payments.clone(), request.map(Body::new))
                });
                let connection =
                    http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection);
            }
        });
        Self { port, trouble, payments, serving }
    }

    /// Returns a URL on this site.
    pub fn url(&self, host: &str, path: &str) -> String {
        format!("http://{host}:{}{path}", self.port)
    }

    /// Returns the payment headers that arrived.
    pub fn payments(&self) -> Vec<String> {
        self.payments.lock().unwrap().clone()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// An error closes the connection without an answer.
async fn answer(
    app: App,
    trouble: Arc<Trouble>,
    payments: Arc<Mutex<Vec<String>>>,
    request: Request<Body>,
) -> Result<Response<Body>, BoxError> {
    let Some(payment) = request.headers().get("payment-signature") else { return app.oneshot(request).await };
    payments.lock().unwrap().push(payment.to_str()?.to_owned());
    if trouble.is_busy.load(Ordering::SeqCst) {
        let busy = Response::builder().status(503).header(RETRY_AFTER, 1);
        return Ok(busy.body(Body::from(r#"{"error":"busy","detail":"Nothing was charged."}"#))?);
    }
    let response = app.oneshot(request).await?;
    if trouble.loses.load(Ordering::SeqCst) { Err("lost".into()) } else { Ok(response) }
}

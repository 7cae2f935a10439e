//! Uploads to a seller that answers before it has read them, over real connections, and our clients that pay for them.

use std::{convert::Infallible, sync::Arc};

use alloy_signer_local::PrivateKeySigner;
use axum::{Router, body::Body};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::net::TcpListener;
use tower::{Layer as _, Service as _, ServiceExt as _};
use tower_x402::{
    Usdc,
    client::{AddPaymentLayer, Budget, Payer, PaymentMiddleware},
    server::{RequestBody, RequirePaymentLayerBuilder},
};

use super::scripted::{Scripted, layer};

/// The sizes of uploads, in bytes.
pub const SIZES: [usize; 4] = [60_000, 300_000, 5_000_000, 20_000_000];

/// Sells on a port of this machine at a price that does not depend on the request. Returns the URL.
pub async fn seller() -> String {
    serve(layer(&Arc::new(Scripted::new()))).await
}

/// Serves on a port of this machine, below the layer: `/length` reads its body, `/blind` does not. Returns the URL.
pub async fn serve(layer: RequirePaymentLayerBuilder) -> String {
    let service = tower::service_fn(async |request: Request<RequestBody<Body>>| {
        let answer = match request.uri().path() {
            "/length" => request.into_body().collect().await.map(|body| body.to_bytes().len().to_string()),
            _ => Ok("well done".to_owned()),
        };
        let mut response = Response::new(Body::empty());
        match answer {
            Ok(text) => *response.body_mut() = text.into(),
            Err(_) => *response.status_mut() = StatusCode::BAD_REQUEST,
        }
        Ok::<_, Infallible>(response)
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().fallback_service(layer.build().unwrap().layer(service));
    tokio::spawn(async { axum::serve(listener, app).await });
    url
}

fn payer() -> Payer {
    let budget = Budget::builder().total(Usdc::from_atomic(1_000_000_000)).build();
    Payer::builder(PrivateKeySigner::random()).budget(budget).build()
}

/// What is posted: each size so often to each path, with the answer.
fn uploads(sizes: &[usize], times: usize) -> impl Iterator<Item = (Bytes, &'static str, String)> {
    sizes.iter().flat_map(move |size| {
        let body = Bytes::from(vec![b'x'; *size]);
        let both = [("length", size.to_string()), ("blind", "well done".to_owned())];
        both.into_iter().cycle().take(2 * times).map(move |(path, answer)| (body.clone(), path, answer))
    })
}

/// Pays for uploads with our middleware of reqwest.
pub async fn paid_by_middleware(url: &str, sizes: &[usize], times: usize) {
    let client = PaymentMiddleware::new(payer()).client(reqwest::Client::builder().no_proxy()).unwrap();
    for (body, path, answer) in uploads(sizes, times) {
        let what = format!("{} bytes to {path}", body.len());
        let response = client.post(format!("{url}/{path}")).body(body).send().await;
        let response = response.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        assert_eq!(response.status(), 200, "{what}");
        assert_eq!(response.text().await.unwrap(), answer, "{what}");
    }
}

/// The same with our tower layer, over hyper's pooled client.
pub async fn paid_by_layer(url: &str, sizes: &[usize], times: usize) {
    let http: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut client = AddPaymentLayer::new(payer()).layer(http);
    for (body, path, answer) in uploads(sizes, times) {
        let what = format!("{} bytes to {path}", body.len());
        let request = Request::post(format!("{url}/{path}")).body(Full::from(body)).unwrap();
        let response = client.ready().await.unwrap().call(request).await;
        let response = response.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        assert_eq!(response.status(), 200, "{what}");
        assert_eq!(axum::body::to_bytes(Body::new(response.into_body()), 1_000).await.unwrap(), answer, "{what}");
    }
}

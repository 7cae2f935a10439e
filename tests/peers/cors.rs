//! A script on another origin pays, in Chromium, where a CORS layer is above ours.

use std::sync::Arc;

use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    http::{HeaderName, Method, header::CONTENT_TYPE},
    response::Html,
    routing::{get, post},
};
use serde_json::Value;
use support::scripted::{Scripted, away, layer};
use tempfile::TempDir;
use tokio::{net::TcpListener, time::timeout};
use tower_http::cors::{Any, CorsLayer};
use tower_x402::server::{cors_allow_headers, cors_expose_headers};

use super::{browser_wallet::chromium, programs::script, stage::PATIENCE};

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await });
    url
}

#[tokio::test]
async fn script_on_another_origin_pays_and_reads_every_header_that_it_needs() {
    let cors = CorsLayer::new()
        .allow_origin(Any)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([cors_allow_headers(), vec![CONTENT_TYPE]].concat())
        .expose_headers([cors_expose_headers(), vec![HeaderName::from_static("x-request-id")]].concat());
    let (good, busy) =
        (Arc::new(Scripted::new()), Arc::new(Scripted::new().verify(|_, _| async { Err(away().into()) })));
    let handler = post(async || ([("x-request-id", "7"), ("x-other", "8")], "well done"));
    let sells =
        |path, facilitator| Router::new().route(path, handler.clone()).layer(layer(facilitator).build().unwrap());
    let seller = serve(sells("/good", &good).merge(sells("/busy", &busy)).layer(cors)).await;
    let page = serve(Router::new().route("/", get(async || Html("<title>elsewhere</title>")))).await;

    let profile = TempDir::new().unwrap();
    let mut program = script(["node", "cors.mjs"]);
    program.args([&page, &format!("{seller}/good"), &format!("{seller}/busy")]);
    program.env("BROWSER", chromium()).env("PROFILE", profile.path());
    program.env("PRIVATE_KEY", PrivateKeySigner::random().to_bytes().to_string());
    let output = timeout(PATIENCE, program.output()).await.expect("the script ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answers: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [paid, unavailable] = [0, 1].map(|index| &answers[index]);
    assert_eq!((&paid["status"], &paid["body"]), (&200.into(), &"well done".into()), "{answers}");
    assert!(paid["headers"]["payment-response"].is_string(), "{answers}");
    assert_eq!(
        (&paid["headers"]["x-request-id"], &paid["headers"]["x-other"]),
        (&"7".into(), &Value::Null),
        "{answers}"
    );
    assert_eq!(
        (&unavailable["status"], &unavailable["headers"]["retry-after"]),
        (&503.into(), &"1".into()),
        "{answers}"
    );
}

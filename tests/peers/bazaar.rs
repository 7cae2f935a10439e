//! Discovery with the official TypeScript packages at pinned versions (tests/peers): their validators read what our servers declare,
//! their client pays them, their facilitator settles for them, and their discovery client reads our facilitator's list.

use std::{
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    routing::post,
};
use serde_json::{Value, json};
use support::{
    anvil::AnvilChain,
    authorization::random_address,
    chain::Chain,
    shop::{Customer, PRICE},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    time::timeout,
};
use tower_x402::{
    Network,
    facilitator::{OnchainFacilitator, RemoteFacilitator},
    server::RequirePaymentLayer,
};
use x402_bazaar::{self as bazaar, BodyType, Discovery, DiscoveryClient, DiscoveryFilter};
use x402_facilitator::FacilitatorService;

const PATIENCE: Duration = Duration::from_secs(60);

fn discovery() -> Discovery {
    Discovery::post(BodyType::Json)
        .body(json!({ "output": "2 + 2 = 4" }))
        .body_schema(json!({ "properties": { "output": { "type": "string" } }, "required": ["output"] }))
        .output(json!({ "score": 1 }))
}

/// Runs a script of tests/peers, and returns the line that it prints.
async fn script(args: &[&str], variables: &[(&str, &str)]) -> Value {
    let mut program = command(args);
    program.envs(variables.iter().copied());
    let output = timeout(PATIENCE, program.output()).await.expect("the script ends").unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new("node");
    command.args(args).current_dir(support::repository().join("tests/peers"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// The official facilitator in a process of its own, killed when dropped.
async fn official_facilitator(chain: &AnvilChain) -> (Child, String) {
    let mut program = command(&["facilitator.mjs"]);
    program.env("PRIVATE_KEY", settler(chain).await.to_bytes().to_string()).env("RPC_URL", chain.rpc_url());
    let mut process = program.spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.expect("it says that it is ready").unwrap();
    let ready: Value = serde_json::from_str(&line.expect("it says that it is ready")).unwrap();
    (process, format!("http://{}", ready["listening"].as_str().unwrap()))
}

async fn settler(chain: &AnvilChain) -> PrivateKeySigner {
    let settler = PrivateKeySigner::random();
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    settler
}

/// Serves a router on a free port.
async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

/// Starts our facilitator service, with a catalogue.
async fn our_facilitator(chain: &AnvilChain) -> String {
    let bank = OnchainFacilitator::builder().rpc_url(chain.rpc_url()).network(Network::BASE_SEPOLIA);
    let bank = bank.signer(settler(chain).await).build().await.unwrap();
    serve(Router::new().fallback_service(FacilitatorService::builder(bank).catalogue(100, PATIENCE).build())).await
}

/// The requests to settle that a facilitator got.
type Settled = Arc<Mutex<Vec<Value>>>;

/// A proxy before a facilitator that records the requests to settle.
async fn listening_in(facilitator: String) -> (String, Settled) {
    let settled = Settled::default();
    let log = settled.clone();
    let front = move |request: Request| {
        let (facilitator, log) = (facilitator.clone(), log.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            if parts.uri.path() == "/settle" {
                log.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
            }
            let forward = reqwest::Client::new().request(parts.method, format!("{facilitator}{}", parts.uri));
            let answer = forward.header("content-type", "application/json").body(body).send().await.unwrap();
            let status = answer.status();
            let body: Bytes = answer.bytes().await.unwrap();
            axum::response::Response::builder()
                .status(status)
                .header("content-type", "application/json")
                .body(Body::from(body))
                .unwrap()
        }
    };
    (serve(Router::new().fallback(front)).await, settled)
}

/// Lets the official client pay our server, which settles through this facilitator. Returns the requests to settle.
async fn sell_one(chain: &AnvilChain, facilitator: String) -> Value {
    let (front, settled) = listening_in(facilitator).await;
    let pay_to = random_address();
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, pay_to)
        .facilitator(RemoteFacilitator::builder(front).build().await.unwrap())
        .public_origin("https://judge.example")
        .description("Evaluates arithmetic")
        .mime_type("application/json")
        .service_name("Judge")
        .tags(["math"])
        .payment_identifier(true)
        .extension(discovery().extension().unwrap())
        .build()
        .unwrap();
    let router = Router::new().route("/evaluate", post(async |_: String| r#"{"score":1}"#)).route_layer(layer);
    let url = format!("{}/evaluate", serve(router).await);
    let buyer = Customer::with_funds(chain, 100 * PRICE).await.signer.to_bytes().to_string();
    let variables = [("PRIVATE_KEY", buyer.as_str()), ("TASK", r#"{"output":"2 + 2 = 4"}"#)];
    let purchase = script(&["fetch_v2.mjs", &url], &variables).await;
    assert_eq!((&purchase["status"], &purchase["payment"]["success"]), (&json!(200), &json!(true)), "{purchase}");
    assert_eq!(chain.balance(pay_to).await, PRICE);
    let mut settled = settled.lock().unwrap().clone();
    assert_eq!(settled.len(), 1);
    settled.remove(0)
}

#[tokio::test]
async fn our_declarations_equal_those_of_the_official_package_on_anvil() {
    let schema = json!({ "properties": { "k": { "type": "string", "minLength": 1 } }, "required": ["k"] });
    let example = json!({ "k": "v" });
    for (ours, method, config) in [
        (Discovery::get(), "GET", json!({})),
        (Discovery::get().output(json!({ "score": 1 })), "GET", json!({ "output": { "example": { "score": 1 } } })),
        (
            Discovery::delete().query(example.clone()).query_schema(schema.clone()),
            "DELETE",
            json!({ "input": example, "inputSchema": schema }),
        ),
        (Discovery::post(BodyType::Json), "POST", json!({ "bodyType": "json" })),
        (Discovery::put(BodyType::FormData), "PUT", json!({ "bodyType": "form-data" })),
        (
            Discovery::patch(BodyType::Json)
                .body(example.clone())
                .body_schema(schema.clone())
                .output(json!({ "score": 1 }))
                .output_schema(json!({ "required": ["score"] })),
            "PATCH",
            json!({ "bodyType": "json", "input": example, "inputSchema": schema,
                "output": { "example": { "score": 1 }, "schema": { "required": ["score"] } } }),
        ),
    ] {
        let asked = json!({ "extensions": ours.extension().unwrap().declared(), "config": config, "method": method });
        let said = script(&["bazaar.mjs", "declared", &asked.to_string()], &[]).await;
        assert_eq!(said["same"], true, "{asked}\n{said}");
        assert_eq!((&said["valid"]["valid"], &said["spec"]["valid"]), (&json!(true), &json!(true)), "{said}");
    }
    // The official package cannot declare these, but its validators accept them.
    for ours in [
        Discovery::post(BodyType::Text).body(json!("words")).output(json!([1, 2])),
        Discovery::post(BodyType::Json).query(example.clone()).query_schema(schema.clone()),
        Discovery::get().output(json!("text")),
    ] {
        let asked = json!({ "extensions": ours.extension().unwrap().declared(), "config": {}, "method": "GET" });
        let said = script(&["bazaar.mjs", "declared", &asked.to_string()], &[]).await;
        assert_eq!((&said["valid"]["valid"], &said["spec"]["valid"]), (&json!(true), &json!(true)), "{said}");
    }
}

/// Our validator supports less of JSON Schema than Ajv, and agrees with Ajv on what it supports.
#[tokio::test]
async fn our_validator_agrees_with_the_official_one_on_anvil() {
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(1.5),
        json!(-3),
        json!(1e3),
        json!(""),
        json!("a"),
        json!("\u{1f600}\u{1f600}"),
        json!([]),
        json!([1]),
        json!([1, 1.0]),
        json!([1, "a", {}]),
        json!({}),
        json!({ "a": 1 }),
        json!({ "a": "x", "b": [1, 2] }),
    ];
    let schemas = [
        json!({}),
        json!({ "type": "integer" }),
        json!({ "type": ["string", "null"] }),
        json!({ "type": "number", "minimum": 1 }),
        json!({ "maximum": 1, "exclusiveMinimum": -3 }),
        json!({ "exclusiveMaximum": 1 }),
        json!({ "minLength": 2 }),
        json!({ "maxLength": 2 }),
        json!({ "const": 1 }),
        json!({ "enum": ["a", null, [1]] }),
        json!({ "required": ["a"] }),
        json!({ "properties": { "a": { "type": "integer" } } }),
        json!({ "properties": { "a": true }, "additionalProperties": false }),
        json!({ "additionalProperties": { "type": "integer" } }),
        json!({ "minProperties": 1, "maxProperties": 1 }),
        json!({ "items": { "type": "integer" } }),
        json!({ "prefixItems": [{ "type": "integer" }], "items": { "type": "string" } }),
        json!({ "minItems": 1, "maxItems": 2 }),
        json!({ "uniqueItems": true }),
        json!({ "anyOf": [{ "type": "string" }, { "minimum": 1 }] }),
        json!({ "oneOf": [{ "type": "integer" }, { "minimum": 1 }] }),
        json!({ "allOf": [{ "type": "object" }, { "required": ["a"] }] }),
        json!({ "not": { "type": "string" } }),
        json!({ "$ref": "#/$defs/x", "$defs": { "x": { "type": "object" } } }),
        json!({ "type": "object", "properties": { "b": { "$ref": "#/$defs/list" } }, "$defs": { "list": { "items": { "minimum": 2 } } } }),
        json!({ "title": "t", "description": "d", "default": 1, "examples": [1], "format": "date", "x-own": {} }),
    ];
    // Wrapped as an extension, so that both validators get the same input.
    let input = |value: &Value| json!({ "input": { "type": "http", "method": "GET", "value": value } });
    let wrapped = |schema: &Value| {
        let mut schema = schema.clone();
        let definitions = schema.as_object_mut().unwrap().remove("$defs").unwrap_or(json!({}));
        json!({ "$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions,
            "properties": { "input": { "properties": { "value": schema } } } })
    };
    let pairs: Vec<_> =
        schemas.iter().flat_map(|schema| values.iter().map(move |value| (wrapped(schema), input(value)))).collect();
    let theirs = script(&["bazaar.mjs", "checked", &json!(pairs).to_string()], &[]).await;
    let theirs = theirs.as_array().unwrap();
    assert_eq!(theirs.len(), pairs.len());
    for ((schema, info), theirs) in pairs.iter().zip(theirs) {
        let ours = bazaar::check(&json!({ "info": info, "schema": schema }));
        assert_eq!(json!(ours.is_ok()), *theirs, "{schema} {info}: {ours:?}");
    }
    assert!(theirs.contains(&json!(true)) && theirs.contains(&json!(false)));
}

#[tokio::test]
async fn official_discovery_client_finds_a_paid_resource_in_our_catalogue_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let facilitator = our_facilitator(&chain).await;
    let settled = sell_one(&chain, facilitator.clone()).await;
    let found = script(&["bazaar.mjs", "list", &facilitator, r#"{"type":"http","limit":5,"offset":0}"#], &[]).await;
    assert_eq!(found["pagination"], json!({ "limit": 5, "offset": 0, "total": 1 }), "{found}");
    let item = &found["items"][0];
    assert_eq!(item["resource"], "https://judge.example/evaluate");
    assert_eq!((&item["type"], &item["x402Version"]), (&json!("http"), &json!(2)));
    assert_eq!(item["accepts"], json!([settled["paymentRequirements"]]));
    assert_eq!(item["extensions"]["bazaar"], discovery().extension().unwrap().declared()["bazaar"]);
    assert_eq!((&item["serviceName"], &item["tags"]), (&json!("Judge"), &json!(["math"])));
    let none = script(&["bazaar.mjs", "list", &facilitator, r#"{"type":"mcp"}"#], &[]).await;
    assert_eq!(none["items"], json!([]));

    // The official facilitator would have listed the same.
    let theirs = script(&["bazaar.mjs", "settled", &settled.to_string()], &[]).await;
    for (here, there) in [("resource", "resourceUrl"), ("description", "description"), ("mimeType", "mimeType")] {
        assert_eq!(item[here], theirs[there], "{theirs}");
    }
    assert_eq!((&item["serviceName"], &item["tags"]), (&theirs["serviceName"], &theirs["tags"]));
    assert_eq!(item["extensions"]["bazaar"]["info"], theirs["discoveryInfo"]);

    let ours = DiscoveryClient::builder(&facilitator).build().unwrap().list(&DiscoveryFilter::default()).await.unwrap();
    assert_eq!(ours.resources[0].url.as_str(), item["resource"].as_str().unwrap());
}

#[tokio::test]
async fn official_facilitator_receives_our_servers_declaration_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let (_process, facilitator) = official_facilitator(&chain).await;
    let settled = sell_one(&chain, facilitator).await;
    let theirs = script(&["bazaar.mjs", "settled", &settled.to_string()], &[]).await;
    assert_eq!(theirs["resourceUrl"], "https://judge.example/evaluate", "{settled}");
    assert_eq!((&theirs["method"], &theirs["description"]), (&json!("POST"), &json!("Evaluates arithmetic")));
    assert_eq!(theirs["discoveryInfo"], discovery().extension().unwrap().declared()["bazaar"]["info"]);
}

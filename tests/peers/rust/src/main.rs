//! The other Rust implementations of x402 as programs, with the arguments and the output of the scripts in `tests/peers`:
//!
//! ```text
//! PRIVATE_KEY=0x… TASK=… rust-peers r402-client URL             buys one evaluation; see buyer.mjs
//! PRIVATE_KEY=0x… TASK=… rust-peers x402-reqwest-v1 URL         the same with another client, in x402 v1; or -v2
//! PAY_TO=0x… FLOW=… … rust-peers r402-server                    sells; see seller.mjs for the rest of the environment
//! FACILITATOR_URL=… PAY_TO=0x… FLOW=… rust-peers x402-axum-v1   the same with another server, in x402 v1; or -v2
//! PRIVATE_KEY=0x… RPC_URL=… rust-peers x402-facilitator         the facilitator of x402-rs; see facilitator.mjs
//! ```

mod r402;
mod seller;
mod x402_rs;

use std::{env, error::Error};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use reqwest_middleware::ClientWithMiddleware;
use serde_json::{Value, json};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["r402-client", url] => buy(r402::client()?, url).await,
        ["x402-reqwest-v1", url] => buy(x402_rs::client(1)?, url).await,
        ["x402-reqwest-v2", url] => buy(x402_rs::client(2)?, url).await,
        ["r402-server"] => seller::serve(r402::server()?).await,
        ["x402-axum-v1"] => seller::serve(x402_rs::server(1)?).await,
        ["x402-axum-v2"] => seller::serve(x402_rs::server(2)?).await,
        ["x402-facilitator"] => seller::serve(x402_rs::facilitator().await?).await,
        _ => Err("which peer?".into()),
    }
}

/// Buys one evaluation and prints `{status, body, payment}`.
async fn buy(client: ClientWithMiddleware, url: &str) -> Result {
    let request = client.post(url).header("content-type", "application/json").body(variable("TASK")?);
    let response = request.send().await?;
    let header = response.headers().get("payment-response").or_else(|| response.headers().get("x-payment-response"));
    let payment: Value = match header {
        Some(header) => serde_json::from_slice(&BASE64_STANDARD.decode(header)?)?,
        None => Value::Null,
    };
    let status = response.status().as_u16();
    println!("{}", json!({ "status": status, "body": response.text().await?, "payment": payment }));
    Ok(())
}

fn variable(name: &str) -> Result<String> {
    env::var(name).map_err(|_| format!("{name} is not set").into())
}

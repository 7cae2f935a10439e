//! What was paid for by routes that are sold in another way since, or not at all.

use http::{HeaderValue, Method};
use serde_json::Value;
use tower_x402::{
    client::{Budget, ChannelPolicy, Payer, PayerBuilder, PermitPolicy},
    protocol::encode_header,
    signers::PrivateKeySigner,
};

use crate::{
    rules::{offer, signed},
    stage::{PRICE, Stage, client},
};

const SOLD: &str =
    "upto = true\n[[route]]\npath = \"/priced\"\nprice = \"$0.001\"\n[[route]]\npath = \"/echo\"\nfree = true\n";
const REMOVED: &str = "upto = true\n[[route]]\npath = \"/created\"\nprice = \"$0.001\"\n";

pub(crate) fn payer(stage: &Stage) -> PayerBuilder {
    let key: PrivateKeySigner = stage.devnet.text("payer_private_key").parse().unwrap();
    let budget = Budget::builder().per_payment("$0.05".parse().unwrap()).total("$1".parse().unwrap()).build();
    Payer::builder(key).budget(budget)
}

/// Signs a payment for what this URL costs.
pub(crate) async fn payment(payer: &Payer, url: &str) -> HeaderValue {
    let demand = client().get(url).send().await.unwrap().headers().clone();
    let signed = payer.pay(&Method::GET, &url.parse().unwrap(), &demand, None).await.unwrap().unwrap();
    signed.header().clone()
}

/// Signs a transfer of what this URL costs.
pub(crate) async fn transfer(stage: &Stage, url: &str) -> HeaderValue {
    encode_header(&signed(stage, &offer(Method::GET, url).await).await).unwrap().parse().unwrap()
}

async fn get(url: &str, payment: &HeaderValue) -> (u16, String) {
    let answer = client().get(url).header("payment-signature", payment).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test]
async fn an_answer_that_was_paid_for_is_given_again_after_its_route_is_removed() {
    let stage = Stage::new().await;
    stage.approve("$1").await;
    let charge = stage.charging_by_file(SOLD).await;
    let url = format!("{}/priced", charge.url());
    let by_permit = || payer(&stage).upto(PermitPolicy::default()).build();
    let by_voucher = || payer(&stage).vouchers(ChannelPolicy::new()).build();
    let bought = [
        ("exact", transfer(&stage, &url).await),
        ("upto", payment(&by_permit(), &url).await),
        ("batch-settlement", payment(&by_voucher(), &url).await),
    ];
    let late = [
        ("exact", transfer(&stage, &url).await),
        ("upto", payment(&by_permit(), &url).await),
        ("batch-settlement", payment(&by_voucher(), &url).await),
    ];
    for (scheme, payment) in &bought {
        assert_eq!(get(&url, payment).await, (200, "done".to_owned()), "{scheme}");
    }
    stage.reload(&charge, REMOVED, ("/priced", 404)).await;
    for (scheme, payment) in &bought {
        assert_eq!(get(&url, payment).await, (200, "done".to_owned()), "{scheme}");
        let (status, body) = get(&format!("{url}?other"), payment).await;
        assert_eq!(status, 409, "{scheme}, for another request: {body}");
    }
    for (scheme, payment) in &late {
        let (status, body) = get(&url, payment).await;
        assert_eq!(status, 404, "{scheme}: {body}");
    }
    // Nor does anything else reach the service, whatever it is called.
    for method in [Method::GET, Method::OPTIONS, Method::POST, Method::HEAD] {
        let asked =
            client().request(method.clone(), format!("{}/echo", charge.url())).header("payment-signature", &late[0].1);
        let asked = asked.header("origin", "https://page.example").header("access-control-request-method", "GET");
        assert!(asked.send().await.unwrap().status().is_client_error(), "{method}");
    }
    charge.stop().await;
    assert_eq!((stage.upstream.count("/priced"), stage.upstream.count("/echo")), (3, 0));
    let report: Value = stage.report().await;
    assert_eq!(report["payments"][0]["owed"]["payments"], 0, "{report}");
    assert_eq!(stage.income().await, 3 * PRICE);
}

#[tokio::test]
async fn work_that_was_paid_for_is_done_after_its_route_is_removed() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(&SOLD.replace("upto = true\n", "flow = \"upfront\"\n")).await;
    let url = format!("{}/priced", charge.url());
    let payment = transfer(&stage, &url).await;
    let failed = client().get(&url).header("payment-signature", &payment).header("x-status", "500");
    assert_eq!(failed.send().await.unwrap().status(), 500);
    stage.reload(&charge, &REMOVED.replace("upto = true\n", ""), ("/priced", 404)).await;
    assert_eq!(get(&url, &payment).await, (200, "done".to_owned()));
    charge.stop().await;
    assert_eq!((stage.upstream.count("/priced"), stage.income().await), (2, PRICE));
}

#[tokio::test]
async fn a_transfer_that_was_made_is_answered_after_its_route_takes_no_more() {
    let stage = Stage::new().await;
    let sold = SOLD.replace("upto = true\n", "");
    let charge = stage.charging_by_file(&sold).await;
    let url = format!("{}/priced", charge.url());
    let (bought, late) = (transfer(&stage, &url).await, transfer(&stage, &url).await);
    assert_eq!(get(&url, &bought).await, (200, "done".to_owned()));
    let metered = sold.replace("price = ", "max_price = ") + "[[route]]\npath = \"/new\"\nprice = \"$0.001\"\n";
    stage.reload(&charge, &metered, ("/new", 402)).await;
    assert_eq!(get(&url, &bought).await, (200, "done".to_owned()));
    assert_eq!(get(&url, &late).await.0, 402);
    charge.stop().await;
    assert_eq!((stage.upstream.count("/priced"), stage.income().await), (1, PRICE));
}

//! What the operator of a seller does, and a payer with its channels.

use serde_json::{Value, json};

use crate::stage::{PRICE, Running, Stage, facts, run, x402};

const BY_VOUCHER: &str = "[[route]]\npath = \"/cheap\"\nmax_price = \"$0.001\"";

/// Returns the lines of standard output as JSON.
fn lines(output: &std::process::Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

#[tokio::test]
async fn what_was_charged_by_voucher_is_claimed_after_a_crash_and_the_rest_refunded() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(BY_VOUCHER).await;
    let journal = stage.path("journal");
    let paid = run(stage
        .pay(&format!("{}/cheap", charge.url()))
        .args(["-d", "", "--budget", "$0.05", "--journal"])
        .arg(&journal))
    .await;
    assert_eq!(facts(&paid)["amount"], "400");

    let mut list = x402();
    let bought = lines(&run(list.args(["channels", "list", "--json", "--journal"]).arg(&journal)).await);
    assert_eq!((bought.len(), &bought[0]["charged"]), (1, &json!("400")), "{bought:?}");
    let mut refund = x402();
    refund.args(["channels", "refund", "--journal"]).arg(&journal);
    refund.env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"));
    let refunded = run(&mut refund).await;
    let said = String::from_utf8_lossy(&refunded.stdout).into_owned();
    assert!(refunded.status.success() && said.contains("$0.0096 in 0x"), "{said}");
    charge.kill().await;

    let sold = |which: &str| {
        let mut command = x402();
        command.args(["channels", "list", which, "--json", "--ledger", &stage.ledger()]);
        command
    };
    assert_eq!(lines(&run(&mut sold("all")).await).len(), 1);
    let mut claim = x402();
    claim
        .args(["channels", "claim", "--json", "--ledger", &stage.ledger(), "--rpc-url", stage.devnet.text("rpc_url")])
        .env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
    let claimed = run(&mut claim).await;
    assert!(claimed.status.success(), "{}", String::from_utf8_lossy(&claimed.stderr));
    // The refund has claimed it, and left the transfer.
    let claimed = facts(&claimed);
    assert_eq!(
        (&claimed["claimed"], &claimed["settled"], &claimed["refused"]),
        (&json!("0"), &json!("400"), &json!(0))
    );
    assert_eq!(stage.income().await, 400);
    assert!(lines(&run(&mut sold("unclaimed")).await).is_empty());
    let output = run(x402().args(["channels", "list", "all", "--ledger", &stage.ledger()])).await;
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(listed.contains("charged $0.0004, unclaimed $0.00, at risk $0.00, in escrow $0.00  payer 0x"), "{listed}");
}

#[tokio::test]
async fn a_payer_withdraws_without_the_seller_in_two_steps() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(BY_VOUCHER).await;
    let journal = stage.path("journal");
    let mut pay = stage.pay(&format!("{}/cheap", charge.url()));
    let paid = run(pay.args(["-d", "", "--budget", "$0.05", "--journal"]).arg(&journal)).await;
    assert!(paid.status.success());
    charge.kill().await;

    let mut list = x402();
    let channel = lines(&run(list.args(["channels", "list", "--json", "--journal"]).arg(&journal)).await)[0].clone();
    let withdraw = |more: &[&str]| {
        let mut command = x402();
        command
            .args(["channels", "withdraw", channel["channel"].as_str().unwrap(), "--journal"])
            .arg(&journal)
            .args(["--rpc-url", stage.devnet.text("rpc_url")])
            .args(more)
            .env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"));
        command
    };
    let without_gas = run(&mut withdraw(&[])).await;
    assert_eq!(without_gas.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&without_gas.stderr).contains("has ETH for gas"));
    stage.ask("devnet_fund", json!([stage.devnet.text("payer"), "0xde0b6b3a7640000"])).await;

    let announced = run(&mut withdraw(&["--json"])).await;
    assert!(announced.status.success(), "{}", String::from_utf8_lossy(&announced.stderr));
    let announced = facts(&announced);
    assert_eq!((&announced["withdraw_delay"], &announced["finished"]), (&json!(900), &json!(false)), "{announced}");
    let early = run(&mut withdraw(&["--finish"])).await;
    assert_eq!(early.status.code(), Some(1), "the delay is not over");
}

#[tokio::test]
async fn the_books_list_find_export_and_reconcile() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let nonce =
        facts(&run(&mut stage.pay(&format!("{}/echo", charge.url()))).await)["nonce"].as_str().unwrap().to_owned();
    charge.stop().await;
    let books = |arguments: &[&str]| {
        let mut command = x402();
        command.args(["books", "--ledger", &stage.ledger()]).args(arguments);
        command
    };
    let listed = lines(&run(&mut books(&["list", "--json"])).await);
    assert_eq!((listed.len(), &listed[0]["amount_units"]), (1, &json!(PRICE.to_string())));
    assert_eq!(lines(&run(&mut books(&["find", &nonce[..12], "--json"])).await), listed);
    assert!(lines(&run(&mut books(&["owed", "--json"])).await).is_empty());
    let exported = String::from_utf8(run(&mut books(&["export"])).await.stdout).unwrap();
    assert!(exported.starts_with("time,network,asset,payer") && exported.lines().count() == 2, "{exported}");
    let key = format!("{}:{nonce}", stage.devnet.text("payer"));
    let mut reconcile = books(&["reconcile", &key, "--json", "--rpc-url", stage.devnet.text("rpc_url")]);
    let reconciled = run(reconcile.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))).await;
    assert_eq!(lines(&reconciled)[0]["nonce"], nonce.as_str(), "{}", String::from_utf8_lossy(&reconciled.stderr));
    assert_eq!(run(&mut books(&["find", "0xffffffffffff"])).await.status.code(), Some(1));
}

#[tokio::test]
async fn a_seller_without_a_node_settles_through_the_facilitator() {
    let stage = Stage::new().await;
    let facilitator = Running::start(
        x402()
            .args(["facilitator", "--listen", "127.0.0.1:0", "--rpc-url", stage.devnet.text("rpc_url")])
            .env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))
            .env("FACILITATOR_KEYS", "a-key-of-the-caller"),
    )
    .await;
    let seller = || {
        let mut command = x402();
        command.args(["charge", "--upstream", &stage.upstream.url, "--price", "$0.001", "--listen", "127.0.0.1:0"]);
        command.args(["--pay-to", stage.devnet.text("payee"), "--facilitator-url", &facilitator.url()]);
        command
    };
    let charge = Running::start(seller().env("FACILITATOR_TOKEN", "a-key-of-the-caller")).await;
    let paid = facts(&run(&mut stage.pay(&format!("{}/echo", charge.url()))).await);
    assert_eq!(paid["outcome"], "settled", "{paid}");
    charge.stop().await;
    facilitator.stop().await;
    assert_eq!(stage.income().await, PRICE);
}

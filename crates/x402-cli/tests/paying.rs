//! What `x402 pay` and `x402 wallet` do.

use serde_json::json;

use crate::stage::{PRICE, Stage, facts, run, x402};

#[tokio::test]
async fn a_dry_run_says_the_price_and_pays_nothing() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let looked = run(stage.pay(&url).arg("--dry-run").env_remove("PAYER_PRIVATE_KEY")).await;
    let found = facts(&looked);
    assert!(looked.status.success(), "{found}");
    assert_eq!((&found["would_pay"], &found["offers"][0]["price"]), (&json!(true), &json!("$0.001")));
    assert_eq!(found["offers"][0]["pay_to"], stage.devnet.ready["payee"]);

    let looked = run(stage.pay(&url).args(["--dry-run", "--budget", "$0.0009"])).await;
    assert_eq!((looked.status.code(), &facts(&looked)["would_pay"]), (Some(1), &json!(false)));
    charge.stop().await;
    assert_eq!(stage.income().await, 0);
    assert_eq!(stage.upstream.count("/echo"), 0);
}

#[tokio::test]
async fn nothing_is_paid_beyond_the_budget() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let refused = run(stage.pay(&format!("{}/echo", charge.url())).args(["--budget", "$0.0009"])).await;
    assert_eq!((refused.status.code(), &facts(&refused)["outcome"]), (Some(1), &json!("refused")));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Nothing was paid"));
    charge.stop().await;
    assert_eq!(stage.income().await, 0);
}

#[tokio::test]
async fn a_file_stays_as_it_is_until_there_is_an_answer() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let (file, new, url) = (stage.path("answer"), stage.path("new"), format!("{}/echo", charge.url()));
    std::fs::write(&file, "x".repeat(10_000)).unwrap();
    for url in [url.as_str(), "http://127.0.0.1:9/"] {
        for file in [&file, &new] {
            let refused = run(stage.pay(url).args(["--budget", "$0.0009", "-o"]).arg(file)).await;
            assert_eq!(refused.status.code(), Some(1));
        }
    }
    assert_eq!((std::fs::read(&file).unwrap().len(), new.exists()), (10_000, false));
    let paid = run(stage.pay(&url).args(["-d", "short", "-o"]).arg(&file)).await;
    assert_eq!(facts(&paid)["outcome"], "settled");
    let written: serde_json::Value = serde_json::from_str(&crate::stage::read(&file)).unwrap();
    assert_eq!(written["body"], "short");
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
}

#[tokio::test]
async fn a_purchase_with_a_name_is_paid_for_once() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let journal = stage.path("journal");
    for _ in 0..2 {
        let mut pay = stage.pay(&format!("{}/echo", charge.url()));
        let paid = run(pay.args(["-d", "x", "--purchase", "monday", "--journal"]).arg(&journal)).await;
        assert_eq!(facts(&paid)["status"], 200);
    }
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
    assert_eq!(stage.upstream.count("/echo"), 1);

    let mut wallet = x402();
    wallet.args(["wallet", "show", "--json", "--rpc-url", stage.devnet.text("rpc_url"), "--journal"]).arg(&journal);
    let shown = facts(&run(wallet.env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"))).await);
    assert_eq!((&shown["spent"], &shown["usdc"], &shown["open"]), (&json!("$0.001"), &json!("$999.999"), &json!([])));
    let mut look = x402();
    look.args(["wallet", "reconcile", "--json", "--rpc-url", stage.devnet.text("rpc_url"), "--journal"]).arg(&journal);
    let found = facts(&run(&mut look).await);
    assert_eq!(found, json!({ "paid": 0, "void": 0, "open": 0 }));
}

#[tokio::test]
async fn a_new_key_is_in_a_file_that_others_cannot_read() {
    let stage = Stage::new().await;
    let file = stage.path("payer.key");
    let made = facts(&run(x402().args(["wallet", "new", "--json"]).arg(&file)).await);
    let mut show = x402();
    let shown = run(show.args(["wallet", "show", "--json", "--key-file"]).arg(&file)).await;
    assert_eq!(facts(&shown)["address"], made["address"], "{made}");
    assert_eq!(run(x402().args(["wallet", "new"]).arg(&file)).await.status.code(), Some(2), "it is not overwritten");
    let unprintable = file.with_file_name(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"k\xff"));
    let refused = run(x402().args(["wallet", "new", "--json"]).arg(&unprintable)).await;
    assert_eq!((refused.status.code(), unprintable.exists()), (Some(2), false));

    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let mut show = x402();
    let shown = run(show.args(["wallet", "show", "--key-file"]).arg(&file)).await;
    assert_eq!(shown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&shown.stderr).contains("chmod 600"));
}

#[tokio::test]
async fn a_new_key_is_encrypted_if_asked_for() {
    let stage = Stage::new().await;
    let file = stage.path("payer.json");
    let with = |password: &str, arguments: &[&str]| {
        let mut command = x402();
        command.env("PAYER_KEYSTORE_PASSWORD", password).args(["wallet"]).args(arguments).arg(&file);
        command
    };
    let unprotected = run(&mut with("", &["new", "--encrypted"])).await;
    assert!(String::from_utf8_lossy(&unprotected.stderr).contains("would protect nothing"));
    assert!(!file.exists());

    let made = facts(&run(&mut with("a long word", &["new", "--encrypted", "--json"])).await);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let shown = facts(&run(&mut with("a long word", &["show", "--json", "--keystore"])).await);
    assert_eq!(shown["address"], made["address"], "{made}");
    assert_eq!(run(&mut with("another word", &["show", "--keystore"])).await.status.code(), Some(2));
    let again = run(&mut with("a long word", &["new", "--encrypted"])).await;
    assert_eq!(again.status.code(), Some(2), "it is not overwritten");
    let shown = facts(&run(&mut with("a long word", &["show", "--json", "--keystore"])).await);
    assert_eq!(shown["address"], made["address"], "{made}");
}

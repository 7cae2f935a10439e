//! The page that a person reads.

use alloy_signer_local::PrivateKeySigner;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use reqwest::{Client, Response};
use x402_market::evidence::{CallOutcome, Pairs};

use super::stage::{Booth, PRICE, Stage, sign_report};
use support::devnet::DevnetChain;

async fn get(stage: &Stage<'_>, path: &str) -> Response {
    Client::new().get(stage.url.join(path).unwrap()).send().await.unwrap()
}

async fn text(stage: &Stage<'_>, path: &str) -> String {
    get(stage, path).await.text().await.unwrap()
}

/// Reports an audited evaluation that ordered so many of four pairs rightly.
async fn report(stage: &Stage<'_>, booth: &Booth, payer: &PrivateKeySigner, right: u32) {
    let paid = stage.pay(payer, booth.payee.address(), PRICE).await;
    let mut record = paid.record(booth.payee.address());
    record.outcome = CallOutcome::answered(Pairs::new(right, 4 - right, 4));
    let report = sign_report(record, Some(paid.transaction), payer).await;
    assert_eq!(stage.post(&report).await.0, 201);
}

#[tokio::test]
async fn person_reads_who_sells_what_for_how_much_and_what_payers_report() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (good, bad) = (stage.booth(&["prose"]).await, stage.booth(&["prose", "sums"]).await);
    let payers = [stage.payer().await, stage.payer().await];
    for payer in &payers {
        report(&stage, &good, payer, 4).await;
        report(&stage, &good, payer, 3).await;
    }
    report(&stage, &bad, &payers[0], 0).await;
    let response = get(&stage, "").await;
    assert_eq!(response.headers()[CONTENT_TYPE], "text/html; charset=utf-8");
    let page = response.text().await.unwrap();
    let (of_good, of_bad) = page.split_once(&bad.payee.address().to_string()).unwrap();
    for part in ["The judge", "$0.001 for each output", "4 audits in 4 reports, by 2 payers since", "1.00"] {
        assert!(of_good.contains(part), "{part} in {of_good}");
    }
    assert!(of_bad.contains("1 audits in 1 reports, by 1 payers since") && of_bad.contains("not audited"), "{of_bad}");
    let worth = |page: &str| -> f64 {
        let (before, _) = page.split_once("<svg").unwrap();
        let cell = before.rsplit("<td>").next().unwrap();
        cell.split(' ').next().unwrap().replace('−', "-").parse().unwrap()
    };
    assert!(worth(of_good) > 0.4 && worth(of_bad) < -0.3, "{} {}", worth(of_good), worth(of_bad));
}

/// Anybody can list a card.
#[tokio::test]
async fn text_on_a_card_is_text_on_the_page() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = Booth::open(&["<b onmouseover='x'>"]).await;
    let attack = "</style><script>alert(1)</script><img src=x onerror=\"alert(2)\">";
    booth.show_adjusted(|card| (card.name, card.description) = (attack.to_owned(), attack.repeat(300))).await;
    let listed = stage.client().list(&booth.url).await;
    assert!(listed.is_ok(), "{listed:?}");
    let response = get(&stage, "?skill=%22%3E%3Cscript%3E").await;
    let policy = response.headers()[CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    let pages = [response.text().await.unwrap(), text(&stage, "").await];
    assert!(pages[0].contains("value=\"&quot;&gt;&lt;script&gt;\""), "{}", pages[0]);
    assert!(pages[1].contains("&lt;/style&gt;&lt;script&gt;alert(1)"), "{}", pages[1]);
    for page in pages {
        for element in ["<script", "<img", "<b ", "</style><"] {
            assert!(!page.contains(element), "{element} in {page}");
        }
        assert_eq!(page.matches("<style").count(), 1);
        assert!(page.len() < 16_000, "{}", page.len());
    }
}

#[tokio::test]
async fn page_is_one_of_several_if_there_are_many_and_is_sent_once_to_who_has_it() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.max_cards(100, 100)).await;
    for number in 0..23 {
        stage.booth(&[if number == 22 { "rare" } else { "prose" }]).await;
    }
    let first = text(&stage, "").await;
    let next = first.split_once("<nav><a href=\"").and_then(|(_, link)| link.split_once('"')).unwrap().0;
    let second = text(&stage, &next.replace("&amp;", "&")).await;
    assert_eq!((first.matches("<article>").count(), second.matches("<article>").count()), (20, 3));
    assert!(!second.contains("<nav>"));
    let rare = text(&stage, "?skill=rare").await;
    assert_eq!(rare.matches("<article>").count(), 1);
    assert!(text(&stage, "?skill=unknown").await.contains("No evaluator is listed here."));

    let tag = get(&stage, "").await.headers()[ETAG].clone();
    let again = Client::new().get(stage.url.clone()).header(IF_NONE_MATCH, tag).send().await.unwrap();
    assert_eq!((again.status().as_u16(), again.text().await.unwrap().len()), (304, 0));
    let posted = Client::new().post(stage.url.clone()).send().await.unwrap();
    assert_eq!(posted.status().as_u16(), 405);
}

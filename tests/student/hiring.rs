//! The ordinary path.

use crate::stage::{PRICE, Stage, group, honest};

#[tokio::test]
async fn a_group_is_judged_by_a_panel_and_every_unit_is_in_the_books() {
    let stage = Stage::set().await;
    let booths = [stage.open(honest()).await, stage.open(honest()).await];
    let student = stage.student(1_000 * PRICE, &[&booths[0], &booths[1]], |student| student.panel(2)).await;
    let feedback = student.evaluate(&group(&["a good one", "a poor one", "another good one"])).await.unwrap();

    let scores: Vec<_> = feedback.outputs.iter().map(|output| output.judged.unwrap().score.get()).collect();
    assert_eq!(scores, [0.9, 0.1, 0.9]);
    assert_eq!(&*feedback.task, "mine");
    assert_eq!(feedback.hires.len(), 2);
    assert!(feedback.outputs.iter().all(|output| output.opinions.len() == 2));
    assert!(feedback.hires.iter().all(|hire| hire.payments[0].transaction.is_some()));
    assert_eq!(feedback.paid.atomic(), 6 * PRICE);

    let books = student.books();
    assert_eq!((books.tasks, books.paid, books.held.atomic(), books.elsewhere.atomic()), (1, feedback.paid, 0, 0));
    assert_eq!(books.paid, student.budget().spent());
    for booth in &booths {
        let account = books.account(booth.payee, "prose").unwrap();
        assert_eq!((account.answered, account.paid.atomic()), (1, stage.income(booth).await));
        assert_eq!(account.paid.atomic(), 3 * PRICE);
    }
}

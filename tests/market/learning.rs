//! The experiments of `docs/learning.md`, in small: each prints its tables with every arm, and draws its picture.

/// Runs an experiment with one seed and 40 groups. Checks the tables that begin so: the first cell of each row, and that no cell is without
/// a number.
async fn prints(experiment: &str, tables: &[(&str, &[&str])]) {
    let out = tempfile::tempdir().unwrap();
    let mut program = support::programs::example("learning");
    program.args(["--experiment", experiment, "--seeds", "1", "--groups", "40", "--out"]).arg(out.path());
    let output = program.output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for (header, rows) in tables {
        let table = text.lines().skip_while(|line| !line.starts_with(header)).take_while(|line| line.starts_with('|'));
        let table: Vec<Vec<&str>> =
            table.skip(2).map(|row| row.trim_matches(['|', ' ']).split(" | ").collect()).collect();
        assert_eq!(table.iter().map(|row| row[0]).collect::<Vec<_>>(), *rows, "{text}");
        assert!(table.iter().flatten().all(|cell| !cell.contains("NaN")), "{text}");
    }
    if let "M" | "S" | "P" | "L" = experiment {
        let picture = std::fs::read_to_string(out.path().join(format!("learning-{experiment}.svg"))).unwrap();
        assert!(picture.contains("<svg"));
    }
}

#[tokio::test]
async fn experiment_on_majorities_prints_every_arm() {
    let arms = [
        "truth",
        "truth in budget",
        "audits only",
        "random",
        "card claims",
        "mixture of three",
        "mixture of all",
        "own model, words",
        "alone",
        "shared",
        "own model, hidden",
        "own model + truth",
        "alone, 1 %",
        "shared, 1 %",
    ];
    prints("M", &[("| final quality | 0 | ¼ | ½ | ¾ | 1 | ¼ + 5 | ¼ + 10 | ¼ + 20 |", &arms)]).await;
}

#[tokio::test]
async fn experiment_on_harsh_specialists_prints_every_arm() {
    let arms = ["truth", "random", "alone, by accuracy", "alone, by D", "shared, by accuracy", "shared, by D"];
    prints("H", &[("| final quality | ¾, harsh |", &arms)]).await;
}

#[tokio::test]
async fn experiment_on_shift_prints_every_arm() {
    let arms = [
        "truth",
        "audits only",
        "random",
        "trained once",
        "own model",
        "static",
        "niche",
        "niche, equals not audited",
        "niche, copies counted",
        "learning, 0 others",
        "learning, 4 others",
        "learning, 4 others, equals not audited",
        "learning, 4 others, copies counted",
        "learning, 19 others",
        "learning without lessons",
    ];
    prints("S", &[("| final quality | 5 % | 2 % |", &arms)]).await;
}

#[tokio::test]
async fn experiment_on_kinds_of_tasks_prints_every_arm() {
    let arms = [
        "truth",
        "random",
        "fixed: tests",
        "fixed: growth",
        "fixed: safety",
        "by type",
        "by type, in turn",
        "alone",
        "shared",
    ];
    prints("T", &[("| final quality | 0 liars | 1 liar | 2 liars |", &arms)]).await;
}

#[tokio::test]
async fn experiment_on_pressure_prints_every_buyer() {
    let incomes = ["random", "card claims", "alone", "shared", "perfect"];
    let tables: [(&str, &[&str]); 2] =
        [("| income", &incomes), ("| buyers |", &["random", "alone", "shared", "perfect"])];
    prints("P", &tables).await;
}

#[tokio::test]
async fn experiment_on_exploits_prints_every_arm() {
    let header = "| final quality | bait and switch | newcomers only | renames | paid |";
    prints("X", &[(header, &["random", "alone", "shared"])]).await;
}

#[tokio::test]
async fn experiment_on_diversity_prints_every_arm() {
    let arms = ["truth", "self-judge", "one judge", "shared", "shared, three criteria"];
    prints("D", &[("| final quality | three right ways |", &arms)]).await;
}

#[tokio::test]
async fn experiment_on_a_judge_that_learns_prints_every_judge_and_both_prices() {
    let arms = ["without lessons", "taught", "a fifth of lessons false", "a fifth false from the shift on"];
    let judges: Vec<&str> = ["static"].into_iter().chain(arms).collect();
    let incomes = ["equal price", "twice the price"].map(|price| arms.map(|arm| format!("{price}, {arm}"))).concat();
    let incomes: Vec<&str> = incomes.iter().map(String::as_str).collect();
    prints("L", &[("| judge |", &judges), ("| income", &incomes)]).await;
}

#[tokio::test]
async fn ablation_prints_every_mechanism() {
    let header = "| without | reference | drift | collusion | infiltration | reentry | M ¾ alone | M ¾ shared | H shared | S niche | S learning |";
    let without = ["nothing", "trust", "claims", "exploration", "forgetting", "price", "anchors"];
    prints("ablation", &[(header, &without)]).await;
}

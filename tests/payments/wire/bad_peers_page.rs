//! Documents are true as far as a program can tell: the tests that they name and the files that they link to exist.

use std::fs;

/// Everything in backquotes that looks like `file.rs::test`. Files are below `tests`, unless they begin with `src` or `crates`.
fn named(page: &str) -> Vec<(&str, &str)> {
    let quoted = page.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| text.split_once(".rs::")).collect()
}

#[test]
fn every_test_that_a_document_names_exists() {
    let root = support::repository();
    let read = |page: &str| fs::read_to_string(root.join(page)).unwrap();
    let page = ["docs/bad-peers.md", "README.md", "COMPARE.md", "SECURITY.md"].map(read).concat();
    let tests = named(&page);
    for (file, test) in &tests {
        let is_unit_test = file.starts_with("src/") || file.starts_with("crates/");
        let file = format!("{}{file}.rs", if is_unit_test { "" } else { "tests/" });
        let source = fs::read_to_string(root.join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let declaration = format!("fn {test}(");
        let found = source.find(&declaration).unwrap_or_else(|| panic!("no test {test} in {file}"));
        // A helper of that name would run nothing.
        let before = &source[..found];
        let is_listed = source.contains(&format!("    {test},\n"));
        let attributes = before.rsplit("\n\n").next().unwrap_or_default();
        let is_in_a_macro = source.contains("macro_rules!") && before.contains("macro_rules!");
        assert!(
            attributes.contains("test]") || attributes.contains("test(") || is_listed || is_in_a_macro,
            "{test} in {file} is no test"
        );
    }
    assert!(tests.len() > 40, "{}", tests.len());
}

#[test]
fn every_row_of_the_page_names_a_test() {
    let page = fs::read_to_string(support::repository().join("docs/bad-peers.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what "));
    for row in rows {
        assert!(!named(row).is_empty(), "{row}");
    }
}

#[test]
fn every_file_that_a_document_links_to_exists() {
    let root = support::repository();
    let mut links = 0;
    for directory in [
        ".",
        "docs",
        "docs/guide",
        "tests",
        "fuzz",
        "crates/x402-cli",
        "crates/x402-cli/docs/guide",
        "crates/x402-market",
        "crates/x402-market/docs/guide",
    ] {
        for entry in fs::read_dir(root.join(directory)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let page = fs::read_to_string(&path).unwrap();
            let inline = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let references =
                page.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ").map(|(_, to)| to));
            let files = inline.chain(references).map(|link| link.split('#').next().unwrap_or_default());
            for file in files.filter(|file| !file.is_empty() && !file.contains("://")) {
                assert!(path.with_file_name(file).exists(), "{} links to {file}", path.display());
                links += 1;
            }
        }
    }
    assert!(links > 50, "{links}");
}

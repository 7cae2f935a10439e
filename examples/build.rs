//! Takes the programs out of the guides, so that `guides/main.rs` can run them as they stand in the documents.
//!
//! Only addresses are replaced: a literal that names a public node, a facilitator or a fixed port becomes an environment variable.

use std::{env, error::Error, fs, path::Path};

/// A program in a guide.
struct Program {
    /// Its name, as an argument of the example `guides`.
    name: &'static str,
    /// The document, from the root of the repository.
    guide: &'static str,
    /// The literals in it that are replaced, each with the name of a variable.
    replaced: &'static [(&'static str, &'static str)],
}

const PROGRAMS: [Program; 6] = [
    Program {
        name: "charge",
        guide: "docs/guide/charge.md",
        replaced: &[("\"127.0.0.1:8545\"", "NODE_LISTEN"), ("\"127.0.0.1:4021\"", "LISTEN")],
    },
    Program {
        name: "pay",
        guide: "docs/guide/pay.md",
        replaced: &[("\"http://127.0.0.1:4021/evaluate\"", "SELLER_URL")],
    },
    Program { name: "production", guide: "docs/guide/production.md", replaced: &[("\"0.0.0.0:4021\"", "LISTEN")] },
    Program {
        name: "remote",
        guide: "docs/guide/remote.md",
        replaced: &[("\"https://x402.org/facilitator\"", "FACILITATOR_URL"), ("\"127.0.0.1:4021\"", "LISTEN")],
    },
    Program {
        name: "facilitator",
        guide: "docs/guide/remote.md",
        replaced: &[("\"https://sepolia.base.org\"", "RPC_URL"), ("\"0.0.0.0:4022\"", "LISTEN")],
    },
    Program {
        name: "sell_verdicts",
        guide: "crates/x402-market/docs/guide/sell-verdicts.md",
        replaced: &[
            ("\"https://sepolia.base.org\"", "RPC_URL"),
            ("\"https://reasons.example\"", "CARD_URL"),
            ("\"0.0.0.0:4021\"", "LISTEN"),
        ],
    },
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    for Program { name, guide, replaced } in PROGRAMS {
        let path = Path::new("..").join(guide);
        println!("cargo::rerun-if-changed={}", path.display());
        let document = fs::read_to_string(&path)?;
        let programs = document.split("```").skip(1).step_by(2).filter(|block| {
            block.starts_with("rust")
                && block.contains("async fn main")
                && replaced.iter().all(|(from, _)| block.contains(from))
        });
        let [program] = programs.collect::<Vec<_>>()[..] else {
            return Err(format!("{guide} has not exactly one program with {replaced:?}").into());
        };
        let (_, program) = program.split_once('\n').ok_or("a block of one line")?;
        let mut program = program.replace("async fn main", "pub(crate) async fn main");
        for (literal, variable) in replaced {
            program = program.replace(literal, &format!("std::env::var(\"{variable}\")?"));
        }
        fs::write(Path::new(&out).join(name).with_extension("rs"), program)?;
    }
    Ok(())
}

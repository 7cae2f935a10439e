//! Takes the Rust code out of the guides, so that `guides/main.rs` can run it as it stands in the documents.
//!
//! Every block of Rust in a guide is listed here, in order: code that nothing runs does not compile. Only addresses, and the
//! permission to ask evaluators on this machine, are replaced.

use std::{env, error::Error, fs, path::Path};

/// The directories of the guides, from the root of the repository.
const DIRECTORIES: [&str; 2] = ["docs/guide", "crates/x402-market/docs/guide"];

/// A block of Rust in a guide.
struct Block {
    /// The name of the guide's file, without its extension.
    guide: &'static str,
    /// The name of the block's module.
    name: &'static str,
    /// The literals in it that are replaced, each by an expression.
    replaced: &'static [(&'static str, &'static str)],
}

const BLOCKS: [Block; 27] = [
    Block {
        guide: "charge",
        name: "charge",
        replaced: &[("\"127.0.0.1:8545\"", "var(\"NODE_LISTEN\")?"), ("\"127.0.0.1:4021\"", "var(\"LISTEN\")?")],
    },
    Block { guide: "charge", name: "on_base", replaced: &[("\"https://sepolia.base.org\"", "var(\"RPC_URL\")?")] },
    Block { guide: "charge", name: "who_paid", replaced: &[] },
    Block { guide: "charge", name: "prices", replaced: &[] },
    Block { guide: "charge", name: "cors", replaced: &[] },
    Block {
        guide: "hire-evaluators",
        name: "hire_evaluators",
        replaced: &[
            ("\"https://www.x402.org/facilitator\"", "var(\"FACILITATOR_URL\")?"),
            (".private_hosts(false)", ".private_hosts(true)"),
        ],
    },
    Block { guide: "hire-evaluators", name: "audits", replaced: &[] },
    Block { guide: "hire-evaluators", name: "lessons", replaced: &[] },
    Block { guide: "hire-evaluators", name: "reports", replaced: &[] },
    Block { guide: "pay", name: "pay", replaced: &[("\"http://127.0.0.1:4021/evaluate\"", "var(\"SELLER_URL\")?")] },
    Block {
        guide: "pay",
        name: "refusals",
        replaced: &[("\"https://api.example/report\"", "var(\"SELLER_URL\").unwrap_or_default()")],
    },
    Block { guide: "pay", name: "named", replaced: &[("\"https://api.example/report\"", "var(\"SELLER_URL\")?")] },
    Block { guide: "pay", name: "reopen", replaced: &[("\"https://mainnet.base.org\"", "var(\"RPC_URL\")?")] },
    Block {
        guide: "pay",
        name: "catalogue",
        replaced: &[("\"https://www.x402.org/facilitator\"", "var(\"FACILITATOR_URL\")?")],
    },
    Block { guide: "production", name: "production", replaced: &[("\"0.0.0.0:4021\"", "var(\"LISTEN\")?")] },
    Block { guide: "production", name: "batches", replaced: &[] },
    Block { guide: "production", name: "end_of_day", replaced: &[] },
    Block {
        guide: "remote",
        name: "remote",
        replaced: &[
            ("\"https://www.x402.org/facilitator\"", "var(\"FACILITATOR_URL\")?"),
            ("\"127.0.0.1:4021\"", "var(\"LISTEN\")?"),
        ],
    },
    Block {
        guide: "remote",
        name: "checked",
        replaced: &[
            ("\"https://facilitator.example\"", "var(\"FACILITATOR_URL\")?"),
            ("\"https://mainnet.base.org\"", "var(\"RPC_URL\")?"),
        ],
    },
    Block {
        guide: "remote",
        name: "facilitator",
        replaced: &[("\"https://sepolia.base.org\"", "var(\"RPC_URL\")?"), ("\"0.0.0.0:4022\"", "var(\"LISTEN\")?")],
    },
    Block {
        guide: "sell-verdicts",
        name: "sell_verdicts",
        replaced: &[
            ("\"https://sepolia.base.org\"", "var(\"RPC_URL\")?"),
            ("\"https://reasons.example\"", "var(\"CARD_URL\")?"),
            ("\"0.0.0.0:4021\"", "var(\"LISTEN\")?"),
        ],
    },
    Block {
        guide: "sell-verdicts",
        name: "verdicts_by_voucher",
        replaced: &[("\"https://sepolia.base.org\"", "var(\"RPC_URL\")?")],
    },
    Block { guide: "sell-verdicts", name: "learning", replaced: &[] },
    Block {
        guide: "train-with-atropos",
        name: "environment",
        replaced: &[("\"http://127.0.0.1:8000\"", "var(\"ATROPOS_URL\")?")],
    },
    Block { guide: "upto", name: "upto", replaced: &[] },
    Block { guide: "vouchers", name: "vouchers", replaced: &[] },
    Block {
        guide: "vouchers",
        name: "channels_elsewhere",
        replaced: &[
            ("\"https://www.x402.org/facilitator\"", "var(\"FACILITATOR_URL\")?"),
            ("\"https://sepolia.base.org\"", "var(\"RPC_URL\")?"),
        ],
    },
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = env::var("OUT_DIR")?;
    let mut taken = 0;
    for directory in DIRECTORIES {
        let directory = Path::new("..").join(directory);
        println!("cargo::rerun-if-changed={}", directory.display());
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            println!("cargo::rerun-if-changed={}", path.display());
            let document = fs::read_to_string(&path)?;
            let code: Vec<_> =
                document.split("```").skip(1).step_by(2).filter(|code| code.starts_with("rust")).collect();
            let blocks: Vec<_> =
                BLOCKS.iter().filter(|block| path.file_stem().is_some_and(|guide| guide == block.guide)).collect();
            if code.len() != blocks.len() {
                let (found, path) = (code.len(), path.display());
                return Err(format!("{path} has {found} blocks of Rust, of which {} are run", blocks.len()).into());
            }
            for (code, block) in code.into_iter().zip(blocks) {
                let program =
                    runnable(code, block).ok_or_else(|| format!("{} is not in {}", block.name, path.display()))?;
                fs::write(Path::new(&out).join(block.name).with_extension("rs"), program)?;
                taken += 1;
            }
        }
    }
    if taken != BLOCKS.len() {
        return Err("a guide is not there".into());
    }
    Ok(())
}

/// Returns the code with its functions visible and its literals replaced, or `None` if it has not all of these literals.
fn runnable(code: &str, block: &Block) -> Option<String> {
    let (_, code) = code.split_once('\n')?;
    let mut code =
        format!("\n{code}").replace("\nasync fn ", "\npub(crate) async fn ").replace("\nfn ", "\npub(crate) fn ");
    for (literal, expression) in block.replaced {
        if !code.contains(literal) {
            return None;
        }
        code = code.replace(literal, &expression.replace("var(", "std::env::var("));
    }
    Some(code)
}

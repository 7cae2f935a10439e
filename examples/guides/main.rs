//! The programs of the guides, as they stand there: `cargo run -p examples --example guides -- charge`.
//!
//! The addresses in them are environment variables here: `build.rs`, which takes the programs out of the documents, names them.

macro_rules! programs {
    ($($name:ident),*) => {
        $(mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        })*

        fn main() -> Result<(), Box<dyn std::error::Error>> {
            match std::env::args().nth(1).as_deref() {
                $(Some(stringify!($name)) => $name::main(),)*
                _ => Err(concat!("name a program:" $(, " ", stringify!($name))*).into()),
            }
        }
    };
}

programs!(charge, facilitator, pay, production, remote, sell_verdicts);

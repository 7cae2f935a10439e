//! Processors that do not go to sleep.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
};

/// While this is held, Linux keeps the processors from sleeping, as for other programs that measure how late things are
/// (PM QoS; `cyclictest` does the same).
///
/// What a virtual processor that sleeps is given back is for its host to say, which may take milliseconds on a busy one:
/// then what is measured is the host.
pub struct Awake(#[expect(dead_code, reason = "the kernel forgets it when this is closed")] File);

/// A latency of so many microseconds is all that a processor's sleep may add.
const NONE: i32 = 0;

impl Awake {
    /// # Errors
    /// Whoever is not root may not ask for that, and some kernels have nobody to ask.
    pub fn keep() -> io::Result<Self> {
        let mut file = OpenOptions::new().write(true).open("/dev/cpu_dma_latency")?;
        file.write_all(&NONE.to_ne_bytes())?;
        Ok(Self(file))
    }

    /// As well as it goes here, which is told.
    pub fn keep_if_possible() -> Option<Self> {
        let awake = Self::keep();
        match &awake {
            Ok(_) => println!("the processors are kept awake (/dev/cpu_dma_latency)"),
            Err(error) => println!("the processors may sleep, and wake late (/dev/cpu_dma_latency: {error})"),
        }
        awake.ok()
    }
}

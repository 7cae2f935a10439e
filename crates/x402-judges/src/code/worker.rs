//! The process that runs one program: it limits itself, reads a request, and writes a report.

use std::{
    fmt,
    io::{self, Read as _, Write as _},
};

use rustix::{
    process::{Resource, Rlimit, setrlimit},
    time::{ClockId, clock_gettime},
};
use starlark::{
    environment::{FrozenModule, Globals, LibraryExtension, Module},
    eval::{Evaluator, ProfileMode},
    syntax::{
        AstModule, Dialect,
        ast::{AstStmt, StmtP},
    },
    values::{Value, list::ListRef},
};
use x402_market::Severity;

use super::{
    job::{Cost, Example, Fault, Job, NO_REQUEST, READY, Report, Request},
    safety,
};

/// The longest request, in bytes.
const MAX_REQUEST: usize = 4 << 20;
/// The processor time of a worker, in seconds. A text in `workers.rs` says it, too.
const CPU_SECONDS: u64 = 4;

/// What a worker may allocate, in bytes, beyond what the process holds when it starts.
const MEMORY: u64 = 256 << 20;
/// The largest heap of Starlark, in bytes. It is looked at only now and then; `MEMORY` holds always.
const HEAP: usize = 64 << 20;
/// How many calls and turns of loops one call of a program may make.
const TICKS: u64 = 1_000_000;
/// How deep calls may be nested.
const CALLS: usize = 64;
/// The longest text of a value in a report, in bytes.
const SHOWN: usize = 200;
/// How often a call is measured. The least of its times counts.
const MEASUREMENTS: usize = 3;
/// The name under which errors name the program.
const PROGRAM: &str = "program";

/// Does the work of one process, and returns its exit status.
pub(super) fn work() -> i32 {
    let request = || -> io::Result<Request> {
        limit()?;
        let mut stdout = io::stdout();
        stdout.write_all(&[READY])?;
        stdout.flush()?;
        let mut request = Vec::new();
        io::stdin().take(MAX_REQUEST as u64).read_to_end(&mut request)?;
        Ok(serde_json::from_slice(&request)?)
    };
    let Ok(request) = request() else { return NO_REQUEST };
    let report = report(request).unwrap_or_else(|fault| Report { faults: vec![fault], ..Report::default() });
    match serde_json::to_writer(io::stdout(), &report) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

/// Takes from this process what a program does not need, for good.
fn limit() -> io::Result<()> {
    let memory = held() + MEMORY;
    let limits = [
        (Resource::As, memory),
        // The first limit says why it ends.
        (Resource::Cpu, CPU_SECONDS),
        (Resource::Core, 0),
        (Resource::Fsize, 0),
        (Resource::Nproc, 0),
        // Standard input and output are open. Nothing can be opened from here on, sockets included.
        (Resource::Nofile, 0),
    ];
    for (resource, limit) in limits {
        let maximum = if matches!(resource, Resource::Cpu) { limit + 1 } else { limit };
        setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(maximum) })?;
    }
    Ok(())
}

/// Returns the address space of this process, in bytes: its code, and what its threads reserved. 0 where there is no `/proc`.
fn held() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    size.and_then(|size| size.trim().strip_suffix(" kB")?.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

fn report(Request { program, job }: Request) -> Result<Report, Fault> {
    let interpreter = Interpreter { globals: Globals::extended_by(&[LibraryExtension::Print]) };
    if let Job::Lint = job {
        // Otherwise a program could switch its judge off.
        let ast = parse(PROGRAM, program.replace("starlark-lint-disable", "starlark-lint-ignored"))?;
        return Ok(Report { is_done: true, faults: safety::check(&ast, &interpreter.globals), ..Report::default() });
    }
    let ast = parse(PROGRAM, program)?;
    let name = first_function(ast.statement());
    let program = interpreter.load(ast)?;
    let mut report = Report { is_done: true, ..Report::default() };
    match job {
        Job::Lint => {}
        Job::Check(examples) => {
            let faults = examples.iter().filter_map(|example| interpreter.check(&program, example).err());
            report.faults.extend(faults);
        }
        Job::Measure(examples) => {
            for (at, example) in examples.iter().enumerate() {
                let is_last = at + 1 == examples.len();
                report.costs.push(interpreter.cost(&program, &example.call, is_last)?);
            }
        }
        Job::Examples { sizes, seed } => {
            let name = name.ok_or_else(|| fault("it defines no function beside `inputs`"))?;
            for size in sizes {
                report.examples.push(interpreter.example(&program, &name, size, seed)?);
            }
        }
    }
    Ok(report)
}

struct Interpreter {
    globals: Globals,
}

impl Interpreter {
    /// Executes the definitions of a program.
    fn load(&self, ast: AstModule) -> Result<FrozenModule, Fault> {
        Module::with_temp_heap(|module| {
            evaluator(&module)?.eval_module(ast, &self.globals).map_err(failed)?;
            module.freeze().map_err(|error| fault(error.err_msg))
        })
    }

    /// Evaluates an expression that uses what a program defines, and reads the result.
    fn evaluate<R>(
        &self,
        program: &FrozenModule,
        expression: &str,
        read: impl for<'v> FnOnce(&Evaluator<'v, '_, '_>, Value<'v>) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        let ast = parse("example", expression.to_owned())?;
        Module::with_temp_heap(|module| {
            module.import_public_symbols(program);
            let mut evaluator = evaluator(&module)?;
            let value = evaluator.eval_module(ast, &self.globals).map_err(failed)?;
            read(&evaluator, value)
        })
    }

    /// Checks that an example holds.
    fn check(&self, program: &FrozenModule, Example { call, expected }: &Example) -> Result<(), Fault> {
        self.evaluate(program, &format!("[{call},\n{expected}\n]"), |_, values| {
            let [value, expected] = items(values)? else { return Err(fault("an example is no call")) };
            if matches!(value.equals(*expected), Ok(true)) {
                return Ok(());
            }
            let (value, expected) = (cut(&value.to_repr()), cut(&expected.to_repr()));
            Err(fault(format!("{} gives {value} and not {expected}", cut(call))))
        })
        .map_err(|fault| Fault { what: format!("{}: {}", cut(call), fault.what), ..fault })
    }

    /// Makes an example of the function with this name.
    fn example(&self, program: &FrozenModule, name: &str, size: usize, seed: u64) -> Result<Example, Fault> {
        let numbers = random(seed ^ (size as u64) << 32, 2 * size + 16);
        let call = self.evaluate(program, &format!("inputs({size}, {numbers:?})"), |_, inputs| {
            let inputs: Vec<String> = items(inputs)?.iter().map(|input| input.to_repr()).collect();
            Ok(format!("{name}({})", inputs.join(", ")))
        })?;
        let expected = self.evaluate(program, &call, |_, value| Ok(value.to_repr()))?;
        let example = Example { call, expected };
        // What the text of a value does not say cannot be compared, as of a function.
        self.check(program, &example).map(|()| example)
    }

    /// Measures a call.
    fn cost(&self, program: &FrozenModule, call: &str, is_last: bool) -> Result<Cost, Fault> {
        let mut least = Cost { nanos: u64::MAX, ..Cost::default() };
        for _ in 0..MEASUREMENTS {
            let begin = clock_gettime(ClockId::ThreadCPUTime);
            let cost = self.evaluate(program, call, |evaluator, _| {
                let nanos = clock_gettime(ClockId::ThreadCPUTime) - begin;
                let heap = evaluator.heap().peak_allocated_bytes() as u64;
                let nanos = u64::try_from(nanos.tv_sec * 1_000_000_000 + nanos.tv_nsec).unwrap_or_default();
                Ok(Cost { ticks: evaluator.get_total_tick_count(), heap, nanos, line: None })
            })?;
            least = if cost.nanos < least.nanos { cost } else { least };
        }
        let line = if is_last { self.slowest_line(program, call)? } else { None };
        Ok(Cost { line, ..least })
    }

    /// Returns the line on which a call spends the most time.
    fn slowest_line(&self, program: &FrozenModule, call: &str) -> Result<Option<usize>, Fault> {
        let ast = parse("example", call.to_owned())?;
        Module::with_temp_heap(|module| {
            module.import_public_symbols(program);
            let mut evaluator = evaluator(&module)?;
            evaluator.enable_profile(&ProfileMode::Statement).map_err(|error| fault(error.to_string()))?;
            evaluator.eval_module(ast, &self.globals).map_err(failed)?;
            let profile = evaluator.gen_profile().and_then(|profile| profile.gen_csv()).map_err(failed)?;
            // File, span, duration and count, the slowest first.
            let slowest = profile.lines().filter_map(|row| row.trim_start_matches('"').strip_prefix(PROGRAM)).next();
            let line =
                slowest.and_then(|row| row.trim_start_matches(['"', ',']).split(':').next()?.parse::<usize>().ok());
            Ok(line.and_then(|line| line.checked_sub(1)))
        })
    }
}

fn evaluator<'v, 'a>(module: &'a Module<'v>) -> Result<Evaluator<'v, 'a, 'a>, Fault> {
    let mut evaluator = Evaluator::new(module);
    let limits = [
        evaluator.set_max_tick_count(TICKS),
        evaluator.set_max_heap_size(HEAP),
        evaluator.set_max_callstack_size(CALLS),
    ];
    limits.into_iter().collect::<Result<(), _>>().map_err(|error| fault(error.to_string()))?;
    Ok(evaluator)
}

fn parse(name: &str, text: String) -> Result<AstModule, Fault> {
    let dialect = Dialect { enable_load: false, enable_f_strings: true, ..Dialect::Standard };
    AstModule::parse(name, text, &dialect).map_err(failed)
}

/// Returns the name of the first function that a program defines, `inputs` and private ones left out.
fn first_function(statement: &AstStmt) -> Option<String> {
    match &statement.node {
        StmtP::Statements(statements) => statements.iter().find_map(first_function),
        StmtP::Def(function) => {
            let name = &function.name.ident;
            (name != "inputs" && !name.starts_with('_')).then(|| name.clone())
        }
        _ => None,
    }
}

fn items<'v>(list: Value<'v>) -> Result<&'v [Value<'v>], Fault> {
    ListRef::from_value(list)
        .map(|list| list.content())
        .ok_or_else(|| fault("`inputs` must return a list of arguments"))
}

/// Returns pseudo-random numbers below 2³¹ (SplitMix64).
fn random(seed: u64, count: usize) -> Vec<u32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 33) as u32
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn fault(what: impl Into<String>) -> Fault {
    Fault { severity: Severity::Major, line: None, what: what.into() }
}

/// Returns what went wrong, and the line if it is one of the program.
fn failed(error: starlark::Error) -> Fault {
    let span = error.span().filter(|span| span.filename() == PROGRAM);
    let line = span.map(|span| span.resolve_span().begin.line);
    Fault { line, ..fault(cut(&error.without_diagnostic())) }
}

/// Returns a text of at most some 200 bytes.
fn cut(text: &impl fmt::Display) -> String {
    let mut text = text.to_string();
    if text.len() > SHOWN {
        text.truncate(text.floor_char_boundary(SHOWN));
        text.push('…');
    }
    text
}

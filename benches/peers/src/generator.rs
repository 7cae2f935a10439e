//! One thread that asks over many connections: it takes as little of the processors as it can, since the seller has the same two.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use http::HeaderValue;
use rustix::event::{
    Timespec,
    epoll::{self, CreateFlags, EventData, EventFlags},
};

use crate::{hot_path, thread_time::ThreadTime};

/// As large as an answer may be, headers and all.
const ANSWER: usize = 16 * 1024;

/// The bytes of a paid request.
pub fn request(payment: &HeaderValue) -> Vec<u8> {
    let task = hot_path::TASK;
    let head = format!(
        "POST /evaluate HTTP/1.1\r\nhost: api.example\r\ncontent-type: application/json\r\ncontent-length: {}\r\npayment-signature: ",
        task.len()
    );
    [head.as_bytes(), payment.as_bytes(), b"\r\n\r\n", task.as_bytes()].concat()
}

/// What became of them.
pub struct Answers {
    /// How long each was answered after it was due.
    pub times: Vec<Duration>,
    /// How many got no 200.
    pub refused: usize,
    /// From the first request to the last answer.
    pub took: Duration,
    /// What this thread had of the processors meanwhile.
    pub cpu: Duration,
}

/// Sends each of the requests once, the first over the first of so many connections and so on in turn: when it is due, or at once if none
/// is ever due, but not before the connection's last request was answered.
pub fn send(
    server: SocketAddr,
    connections: usize,
    requests: &[Vec<u8>],
    every: Option<Duration>,
) -> io::Result<Answers> {
    let ready = epoll::create(CreateFlags::CLOEXEC)?;
    let mut lines = Vec::with_capacity(connections);
    for number in 0..connections {
        let line = Line::to(server, number)?;
        epoll::add(&ready, &line.stream, EventData::new_u64(number as u64), EventFlags::IN)?;
        lines.push(line);
    }
    let mut idle: Vec<usize> = (0..connections).collect();
    let mut answers =
        Answers { times: Vec::with_capacity(requests.len()), refused: 0, took: Duration::ZERO, cpu: Duration::ZERO };
    let mut events = Vec::with_capacity(connections);
    let (start, cpu) = (Instant::now(), ThreadTime::now());
    let due = |number: usize| every.map(|every| start + every * number as u32);
    while answers.times.len() < requests.len() {
        let now = Instant::now();
        let mut next_due = None;
        for number in std::mem::take(&mut idle) {
            let line = &mut lines[number];
            let Some(request) = requests.get(line.next) else {
                // It has had its last answer. Node closes a connection that is idle for five seconds, while others may still wait.
                epoll::delete(&ready, &line.stream)?;
                continue;
            };
            match due(line.next).filter(|due| *due > now) {
                Some(due) => {
                    idle.push(number);
                    next_due = Some(next_due.map_or(due, |next: Instant| next.min(due)));
                }
                None => {
                    line.ask(request, due(line.next).unwrap_or_else(Instant::now))?;
                    line.next += connections;
                }
            }
        }
        let wait = next_due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        events.clear();
        epoll::wait(&ready, rustix::buffer::spare_capacity(&mut events), wait.as_ref())?;
        for event in &events {
            let number = event.data.u64() as usize;
            let Some(status) = lines[number].hear()? else { continue };
            answers.times.push(lines[number].due.elapsed());
            if status != 200 && answers.refused == 0 {
                eprintln!("{}", String::from_utf8_lossy(&lines[number].answer));
            }
            answers.refused += usize::from(status != 200);
            lines[number].answer.clear();
            idle.push(number);
        }
    }
    (answers.took, answers.cpu) = (start.elapsed(), cpu.elapsed());
    Ok(answers)
}

/// A connection, and what was heard of the answer to its last request.
struct Line {
    stream: TcpStream,
    /// The number of its next request.
    next: usize,
    due: Instant,
    answer: Vec<u8>,
}

impl Line {
    fn to(server: SocketAddr, next: usize) -> io::Result<Self> {
        let stream = TcpStream::connect(server)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, next, due: Instant::now(), answer: Vec::with_capacity(ANSWER) })
    }

    fn ask(&mut self, request: &[u8], due: Instant) -> io::Result<()> {
        self.due = due;
        // The kernel keeps far more of an idle connection than a request.
        if self.stream.write(request)? == request.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// The status of the answer, once all of it is here.
    fn hear(&mut self) -> io::Result<Option<u16>> {
        let mut bytes = [0; ANSWER];
        let heard = match self.stream.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(heard) => heard,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        self.answer.extend_from_slice(&bytes[..heard]);
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(body) = head.parse(&self.answer).map_err(io::Error::other)? else {
            return Ok(None);
        };
        let length = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
        let length = length.and_then(|length| str::from_utf8(length.value).ok()?.parse::<usize>().ok());
        let length = length.ok_or_else(|| io::Error::other("an answer that does not say how long it is"))?;
        Ok(head.code.filter(|_| self.answer.len() >= body + length))
    }
}

fn timespec(wait: Duration) -> Timespec {
    Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() }
}

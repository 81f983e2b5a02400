//! `windlass top`: the live page in a terminal.
//!
//! Owns: asking the controller, the screen, and its restoration however this ends. The document of `GET /status` is asked
//! for once per interval and drawn by [`frame`]; on a terminal in place, otherwise one frame after the other. A controller
//! that cannot be reached is told above the last frame and asked again, except with `--once`, which fails.

pub(crate) mod frame;
pub(crate) mod trace;

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use windlass_data::stop::Stop;

use self::frame::{Frame, Style};
use crate::console::{Session, print};
use crate::error::Error;
use crate::service::controller::client::{ControllerClient, ControllerError};
use crate::service::controller::status::Status;
use crate::tools::outfile::OutFile;

/// Rows and columns where there is no terminal to ask.
const PLAIN: (usize, usize) = (usize::MAX, 1000);

/// The checked arguments of `top`.
#[derive(Debug)]
pub(crate) struct Top {
    pub(crate) controller: ControllerClient,
    /// One frame, not many.
    pub(crate) once: bool,
    /// The time between two frames.
    pub(crate) interval: Duration,
    /// Where to write the syncs as a trace, instead of showing anything.
    pub(crate) trace: Option<PathBuf>,
}

impl Top {
    /// Shows frames until Ctrl-C.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        if let Some(file) = &self.trace {
            return self.write_trace(file, session);
        }
        if self.once || session.json() {
            let status = self.ask(session)?;
            let object = serde_json::to_value(&status).map_err(|e| Error::Bug(e.to_string()))?;
            let text = self.frame((usize::MAX, size().1), Style::of_stdout()).draw(&status, None);
            return session.finish(object, |out| out.push_str(&text));
        }
        if io::stdout().is_terminal() { self.watch(session) } else { self.list(session) }
    }

    fn write_trace(&self, file: &Path, session: &Session) -> Result<(), Error> {
        let events = trace::events(&self.ask(session)?);
        let out = OutFile::create(file, &[])?;
        let written = serde_json::to_writer(io::BufWriter::new(out.file()), &events);
        written.map_err(|e| Error::io("write", file)(e.into()))?;
        out.commit()?;
        let count = events.pointer("/traceEvents").and_then(Value::as_array).map_or(0, Vec::len);
        session.finish(json!({ "trace": file, "events": count }), |out| {
            let _ = writeln!(out, "{}: {count} events; open it at ui.perfetto.dev", file.display());
        })
    }

    fn frame(&self, size: (usize, usize), style: Style) -> Frame<'_> {
        Frame::new(self.controller.peer(), size, style)
    }

    fn ask(&self, session: &Session) -> Result<Status, ControllerError> {
        self.controller.status(session.cancel())
    }

    /// Prints frame after frame, for files and pipes, until an interrupt or a closed pipe.
    fn list(&self, session: &Session) -> Result<(), Error> {
        loop {
            match self.next(session)? {
                Next::Status(status) => {
                    let text = self.frame(PLAIN, Style::Plain).draw(&status, None);
                    if io::stdout().lock().write_all(format!("{text}\n").as_bytes()).is_err() {
                        return Ok(());
                    }
                }
                Next::Lost(why) => session.note(&why),
                Next::End => return Ok(()),
            }
            if !pause(self.interval, session.cancel()) {
                return Ok(());
            }
        }
    }

    /// One frame in the place of another.
    fn watch(&self, session: &Session) -> Result<(), Error> {
        // What is wrong from the start is told where it can still be read afterwards.
        let mut last = self.ask(session)?;
        let _screen = Screen::open()?;
        let mut lost = None;
        loop {
            Screen::show(&self.frame(size(), Style::of_stdout()).draw(&last, lost.as_deref()))?;
            if !pause(self.interval, session.cancel()) {
                return Ok(());
            }
            match self.next(session)? {
                Next::Status(status) => (last, lost) = (*status, None),
                Next::Lost(why) => lost = Some(why),
                Next::End => return Ok(()),
            }
        }
    }

    /// Polls again. An unreachable controller may come back; a refusal is final.
    fn next(&self, session: &Session) -> Result<Next, Error> {
        match self.ask(session) {
            Ok(status) => Ok(Next::Status(Box::new(status))),
            Err(_) if session.cancel().is_set() => Ok(Next::End),
            Err(e @ ControllerError::Lost { .. }) => Ok(Next::Lost(e.to_string())),
            Err(e) => Err(e.into()),
        }
    }
}

/// What came of asking.
enum Next {
    Status(Box<Status>),
    Lost(String),
    End,
}

/// Waits; answers whether to go on.
fn pause(time: Duration, stop: &Stop) -> bool {
    let until = Instant::now() + time;
    while !stop.is_set() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
    false
}

fn size() -> (usize, usize) {
    let size = terminal_size::terminal_size_of(io::stdout());
    size.map_or(PLAIN, |(columns, rows)| (rows.0.into(), columns.0.into()))
}

/// The terminal's second screen, without a cursor. The first comes back when this is dropped.
struct Screen;

impl Screen {
    fn open() -> Result<Screen, Error> {
        print("\x1b[?1049h\x1b[?25l")?;
        Ok(Screen)
    }

    /// Writes over what is there; what is longer than the new text is cleared.
    fn show(text: &str) -> Result<(), Error> {
        let lines: Vec<String> = text.lines().map(|l| format!("{l}\x1b[K")).collect();
        print(&format!("\x1b[H{}\x1b[J", lines.join("\r\n")))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = print("\x1b[?25h\x1b[?1049l");
    }
}

//! How a command talks: tables and progress bars for people, one JSON object for machines.
//!
//! Owns: standard output, standard error, and the flag that Ctrl-C sets. In JSON mode the last line of
//! standard output is one JSON object, also when the command fails, and nothing else is printed. Otherwise
//! results go to standard output and progress and errors to standard error. Progress bars show only on a
//! terminal.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use windlass_data::stop::Stop;

use crate::error::{Error, advised};

/// One run of the command.
#[derive(Clone, Debug)]
pub struct Session {
    json: bool,
    cancel: Stop,
}

impl Session {
    /// A session that stops on Ctrl-C or SIGTERM; a second one of either ends the process at once.
    pub fn start(json: bool) -> Result<Session, Error> {
        // Not one flag: others set `stop` too, and the first signal after that is still the first.
        let (stop, signalled) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The order matters: the first signal finds the flag unset, sets it, and only the next one exits.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&signalled))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&signalled)))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
                .map_err(|e| Error::Bug(format!("signal handler: {e}")))?;
        }
        // A file that grows beyond the limit on file sizes (`ulimit -f`) is a write that fails, as on a full disk; without a
        // handler it is the end of the process. Python ignores the signal by itself.
        signal_hook::flag::register(libc::SIGXFSZ, Arc::default())
            .map_err(|e| Error::Bug(format!("signal handler: {e}")))?;
        Ok(Session { json, cancel: Stop::from_flag(stop) })
    }

    /// Whether to speak JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Set by Ctrl-C; has no deadline.
    pub fn cancel(&self) -> &Stop {
        &self.cancel
    }

    /// Prints the result: the object in JSON mode, otherwise what `human` writes.
    pub fn finish(&self, object: Value, human: impl FnOnce(&mut String)) -> Result<(), Error> {
        let text = if self.json {
            format!("{object}\n")
        } else {
            let mut text = String::new();
            human(&mut text);
            text
        };
        print(&text)
    }

    /// Something that happened in a command that runs for long: a line of JSON, or what `human` says.
    pub fn event(&self, object: &Value, human: impl FnOnce() -> String) {
        let line = if self.json { object.to_string() } else { human() };
        // Whoever listened is gone; the work goes on.
        let _ = print(&format!("{line}\n"));
    }

    /// Calls `end` when standard input ends: whoever started this is gone. What is said there is ignored.
    pub fn with_parent(&self, end: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let watch = move || {
            // A failed read says as much as the end.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            end();
        };
        // Ends with the process: nothing can take it out of that read.
        let thread = std::thread::Builder::new().name("windlass-parent".into()).spawn(watch);
        thread.map(drop).map_err(|e| Error::Bug(format!("no thread: {e}")))
    }

    /// A bar over `total` bytes. Hidden in JSON mode and when standard error is not a terminal.
    pub fn progress(&self, what: &'static str, total: u64) -> Progress {
        if self.json || !io::stderr().is_terminal() {
            return Progress(ProgressBar::hidden());
        }
        let template = "{msg:>9} {bar:20} {percent:>3}%  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(what);
        Progress(bar)
    }

    /// A bar over steps with a word about the present one. Hidden like [`Session::progress`].
    pub fn steps(&self, total: u64) -> Progress {
        if self.json || !io::stderr().is_terminal() {
            return Progress(ProgressBar::hidden());
        }
        let template = "{bar:20} {pos}/{len}  {wide_msg}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(style.progress_chars("=> "));
        Progress(bar)
    }

    /// A line about what is going on, for people only.
    pub fn note(&self, text: &str) {
        if !self.json {
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }
}

/// Writes to standard output.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A reader such as `head` that has seen enough is not a failure.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::Io { action: "write to", path: "standard output".into(), source: e })
        }
        _ => Ok(()),
    }
}

/// Prints a failure and gives the exit code. Where the JSON cannot be written, that is the failure to tell; where
/// standard error cannot be written to, the exit code still says what happened.
pub fn report(error: &Error, json: bool) -> u8 {
    let row = error.kind().row();
    if json {
        let object = json!({ "error": {
            "kind": error.kind(),
            "message": error.chain(),
            "advice": error.advice(),
            "exit": row.exit,
        }});
        if let Err(lost) = print(&format!("{object}\n")) {
            report(error, false);
            return report(&lost, false);
        }
    } else {
        let _ = writeln!(io::stderr().lock(), "error: {}", advised(&error.chain(), &error.advice()));
    }
    row.exit
}

/// A progress bar that disappears when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// What is going on.
    pub fn say(&self, text: &str) {
        self.0.set_message(text.to_owned());
        self.0.tick();
    }

    /// So many bytes or steps more.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Names are not made shorter than this, however narrow the terminal.
const MIN_NAME: usize = 16;

/// A table for people: the first column to the left, the others to the right.
#[derive(Debug)]
pub struct Table(Vec<Vec<String>>);

impl Table {
    /// A table with these headings.
    pub fn new<const N: usize>(head: [&str; N]) -> Table {
        Table(vec![head.map(str::to_owned).to_vec()])
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.push(cells.to_vec());
    }

    /// Appends the table to `out`, indented by two spaces. On a terminal that is too narrow for it, the middle of
    /// long names in the first column is left out.
    pub fn write(&self, out: &mut String) {
        let size = terminal_size::terminal_size_of(io::stdout());
        self.write_within(out, size.map_or(usize::MAX, |(w, _)| w.0.into()));
    }

    fn write_within(&self, out: &mut String, columns_shown: usize) {
        let columns = self.0.first().map_or(0, Vec::len);
        let width =
            |c: usize| self.0.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..columns).map(width).collect();
        let excess = widths.iter().map(|w| w + 2).sum::<usize>().saturating_sub(columns_shown);
        if let Some(first) = widths.first_mut() {
            *first = (*first).min(first.saturating_sub(excess).max(MIN_NAME));
        }
        for row in &self.0 {
            let mut line = String::new();
            for (c, (cell, &w)) in row.iter().zip(&widths).enumerate() {
                let _ = if c == 0 {
                    write!(line, "  {:<w$}", shorten(cell, w))
                } else {
                    write!(line, "  {cell:>w$}")
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
}

/// A text of at most `width` characters: the middle of a longer one is left out.
fn shorten(text: &str, width: usize) -> String {
    let n = text.chars().count();
    if n <= width {
        return text.to_owned();
    }
    let (head, tail) = (width.saturating_sub(1) / 2, width / 2);
    text.chars().take(head).chain(['…']).chain(text.chars().skip(n - tail)).collect()
}

/// An error of clap's on one line, without its pointer to help, which is the advice.
pub fn one_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let kept = text.lines().filter(|l| !l.starts_with("For more information"));
    kept.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// Four significant digits or so: more would be noise.
pub fn round(x: f64) -> f64 {
    let scale = 10f64.powf(3.0 - x.abs().max(1e-300).log10().floor());
    if x == 0.0 { 0.0 } else { (x * scale).round() / scale }
}

/// Bytes for people: `1.50 GiB`.
pub fn bytes(n: u64) -> String {
    indicatif::HumanBytes(n).to_string()
}

/// Counts for people: `1,234,567`.
pub fn count(n: u64) -> String {
    indicatif::HumanCount(n).to_string()
}

/// Shares for people: `1.53 %`.
pub fn percent(share: f64) -> String {
    format!("{:.*} %", if share > 0.0 && share < 0.001 { 4 } else { 2 }, share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_their_columns() {
        let mut t = Table::new(["name", "n"]);
        t.row(["ä".into(), "1000".into()]);
        t.row(["long name".into(), "1".into()]);
        let mut s = String::new();
        t.write(&mut s);
        assert_eq!(s, "  name          n\n  ä          1000\n  long name     1\n");
    }

    #[test]
    fn tables_leave_out_the_middle_of_names_on_narrow_terminals() {
        let mut t = Table::new(["tensor", "n"]);
        t.row(["model.layers.0.self_attn.q_proj.weight".into(), "1000".into()]);
        t.row(["short".into(), "1".into()]);
        let mut s = String::new();
        t.write_within(&mut s, 30);
        let lines: Vec<&str> = s.lines().collect();
        assert_eq!(lines[1], "  model.laye…proj.weight  1000");
        assert!(lines.iter().all(|l| l.chars().count() <= 30) && lines[2].ends_with("    1"));
        let mut s = String::new();
        t.write_within(&mut s, 5);
        assert!(
            s.contains(&format!("{}  1000", shorten("model.layers.0.self_attn.q_proj.weight", MIN_NAME)))
        );
        let mut s = String::new();
        t.write_within(&mut s, usize::MAX);
        assert!(s.contains("model.layers.0.self_attn.q_proj.weight"));
    }

    #[test]
    fn small_shares_keep_their_digits() {
        assert_eq!(percent(0.015_34), "1.53 %");
        assert_eq!(percent(0.000_234), "0.0234 %");
        assert_eq!(percent(0.0), "0.00 %");
    }
}

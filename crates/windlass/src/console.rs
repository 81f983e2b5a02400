//! Output of a command: tables and progress bars for people, one JSON object for programs.
//!
//! Owns: standard output, standard error, and the flag that Ctrl-C sets. In JSON mode the last line of
//! standard output is one JSON object, even if the command fails, and nothing else is printed. Otherwise
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
pub(crate) struct Session {
    json: bool,
    cancel: Stop,
}

impl Session {
    /// A session that stops on Ctrl-C or SIGTERM. A second signal ends the process at once.
    pub(crate) fn start(json: bool) -> Result<Session, Error> {
        // Two flags: other code sets `stop` too, and the next signal must still count as the first.
        let (stop, signalled) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The order matters: the first signal finds the flag unset, sets it, and only the next one exits.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&signalled))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&signalled)))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
                .map_err(|e| Error::Bug(format!("signal handler: {e}")))?;
        }
        // With a handler, a write beyond the file size limit (`ulimit -f`) fails as on a full disk. Without one, the signal ends
        // the process. Python ignores it by default.
        signal_hook::flag::register(libc::SIGXFSZ, Arc::default())
            .map_err(|e| Error::Bug(format!("signal handler: {e}")))?;
        Ok(Session { json, cancel: Stop::from_flag(stop) })
    }

    /// Whether output is JSON.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Set by Ctrl-C; has no deadline.
    pub(crate) fn cancel(&self) -> &Stop {
        &self.cancel
    }

    /// Prints the result: the object in JSON mode, otherwise what `human` writes.
    pub(crate) fn finish(&self, object: Value, human: impl FnOnce(&mut String)) -> Result<(), Error> {
        let text = if self.json {
            format!("{object}\n")
        } else {
            let mut text = String::new();
            human(&mut text);
            text
        };
        print(&text)
    }

    /// Reports an event of a long-running command: a line of JSON, or the text of `human`.
    pub(crate) fn event(&self, object: &Value, human: impl FnOnce() -> String) {
        let line = if self.json { object.to_string() } else { human() };
        // If the reader is gone, the work continues.
        let _ = print(&format!("{line}\n"));
    }

    /// Calls `end` when standard input closes, that is, when the parent process exits. Ignores the input itself.
    pub(crate) fn with_parent(end: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let watch = move || {
            // A failed read means the same as end of file.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            end();
        };
        // The thread ends with the process: nothing can interrupt that read.
        let thread = std::thread::Builder::new().name("windlass-parent".into()).spawn(watch);
        thread.map(drop).map_err(|e| Error::Bug(format!("no thread: {e}")))
    }

    /// A bar over `total` bytes. Hidden in JSON mode and when standard error is not a terminal.
    pub(crate) fn progress(&self, what: &'static str, total: u64) -> Progress {
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

    /// A bar over steps with a message about the current one. Hidden like [`Session::progress`].
    pub(crate) fn steps(&self, total: u64) -> Progress {
        if self.json || !io::stderr().is_terminal() {
            return Progress(ProgressBar::hidden());
        }
        let template = "{bar:20} {pos}/{len}  {wide_msg}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(style.progress_chars("=> "));
        Progress(bar)
    }

    /// Prints a line on progress, for people only.
    pub(crate) fn note(&self, text: &str) {
        if !self.json {
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }
}

/// Writes to standard output.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A closed pipe, as by `head`, is not a failure.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::Io { action: "write to", path: "standard output".into(), source: e })
        }
        _ => Ok(()),
    }
}

/// Prints a failure and returns the exit code. If the JSON cannot be written, that failure is reported instead. If standard
/// error is closed, the exit code remains.
pub(crate) fn report(error: &Error, json: bool) -> u8 {
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
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Sets the message.
    pub(crate) fn say(&self, text: &str) {
        self.0.set_message(text.to_owned());
        self.0.tick();
    }

    /// Advances by bytes or steps.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The shortest width of a name, on any terminal.
const MIN_NAME: usize = 16;

/// A table for people: the first column is left-aligned, the others right-aligned.
#[derive(Debug)]
pub(crate) struct Table(Vec<Vec<String>>);

impl Table {
    /// A table with these headings.
    pub(crate) fn new<const N: usize>(head: [&str; N]) -> Table {
        Table(vec![head.map(str::to_owned).to_vec()])
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.push(cells.to_vec());
    }

    /// Appends the table to `out`, indented by two spaces. On a terminal that is too narrow for it, the middle of
    /// long names in the first column is left out.
    pub(crate) fn write(&self, out: &mut String) {
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
pub(crate) fn one_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let kept = text.lines().filter(|l| !l.starts_with("For more information"));
    kept.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// Four significant digits or so: more would be noise.
pub(crate) fn round(x: f64) -> f64 {
    let scale = 10f64.powf(3.0 - x.abs().max(1e-300).log10().floor());
    if x == 0.0 { 0.0 } else { (x * scale).round() / scale }
}

/// Bytes for people: `1.50 GiB`.
pub(crate) fn bytes(n: u64) -> String {
    indicatif::HumanBytes(n).to_string()
}

/// Counts for people: `1,234,567`.
pub(crate) fn count(n: u64) -> String {
    indicatif::HumanCount(n).to_string()
}

/// Shares for people: `1.53 %`.
pub(crate) fn percent(share: f64) -> String {
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

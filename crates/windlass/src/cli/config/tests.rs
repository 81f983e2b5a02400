use std::path::Path;

use super::*;

/// A parser with everything that flags can be.
fn root() -> Command {
    let arg = |long: &'static str| Arg::new(long).long(long);
    let number = || clap::value_parser!(u16).range(1..=64);
    let work = Command::new("work")
        .arg(arg("region").required(true))
        .arg(arg("streams").value_parser(number()).default_value("6"))
        .arg(arg("from").action(ArgAction::Append))
        .arg(arg("group").action(ArgAction::SetTrue))
        .arg(arg("elements").conflicts_with("bytes"))
        .arg(arg("bytes"))
        .arg(arg("output"))
        .arg(arg("in-place").action(ArgAction::SetTrue))
        .arg(arg("lease").requires("from"))
        .arg(arg("controller").conflicts_with("from"))
        .arg(arg("secret").hide(true))
        .arg(Arg::new("path"))
        .group(clap::ArgGroup::new("place").required(true).args(["output", "in-place"]));
    Command::new("windlass")
        .arg(Arg::new("json").long("json").global(true).action(ArgAction::SetTrue))
        .arg(Arg::new("config_file").long(FLAG).global(true))
        .subcommand(work)
        .subcommand(Command::new("bench").subcommand(Command::new("codec").arg(arg("elements"))))
        .subcommand(Command::new("hidden").hide(true).arg(arg("streams")))
}

fn around(directory: &Path, variables: &[(&str, &str)]) -> Surroundings {
    let environment = variables.iter().map(|(k, v)| (k.into(), v.into())).collect();
    Surroundings { directory: directory.to_owned(), environment }
}

/// What the arguments become beside this file and these variables.
fn completed(file: &str, variables: &[(&str, &str)], arguments: &str) -> Result<String, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    if !file.is_empty() {
        std::fs::write(dir.path().join(FILE), file).unwrap();
    }
    let words = format!("windlass {arguments}").split_whitespace().map(OsString::from).collect();
    let completed = complete(&root(), words, &around(dir.path(), variables))?;
    let words: Vec<&str> = completed.arguments.iter().skip(1).map(|a| a.to_str().unwrap()).collect();
    Ok(words.join(" "))
}

fn refused(file: &str, variables: &[(&str, &str)]) -> String {
    let error = completed(file, variables, "work --region=r").unwrap_err();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(!error.advice.is_empty());
    // The directory is another one each time.
    error.to_string().rsplit('/').next().unwrap().to_owned()
}

#[test]
fn flags_win_over_the_environment_which_wins_over_the_file() {
    let file = "[work]\nstreams = 2\nregion = \"f\"\noutput = 'o'\n";
    let variables = [("WINDLASS_WORK_STREAMS", "3")];
    assert_eq!(completed(file, &[], "work"), Ok("work --output=o --region=f --streams=2".into()));
    assert_eq!(completed(file, &variables, "work"), Ok("work --streams=3 --output=o --region=f".into()));
    assert_eq!(
        completed(file, &variables, "work --streams 4 p"),
        Ok("work --output=o --region=f --streams 4 p".into())
    );
    assert_eq!(completed("", &[], "work --streams 4"), Ok("work --streams 4".into()));
}

#[test]
fn values_go_behind_the_names_of_the_command_whatever_stands_before_them() {
    let file = "[bench.codec]\nelements = '64Mi'\n[work]\nstreams = 2\n";
    assert_eq!(completed(file, &[], "--json bench codec"), Ok("--json bench codec --elements=64Mi".into()));
    assert_eq!(completed(file, &[], "bench codec --json"), Ok("bench codec --elements=64Mi --json".into()));
    let variables = [("WINDLASS_BENCH_CODEC_ELEMENTS", "1")];
    assert_eq!(
        completed(file, &variables, "bench --json codec"),
        Ok("bench --json codec --elements=1".into())
    );
    // A file named like the command is no name of it.
    let other = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(other.path(), "[work]\nstreams = 5").unwrap();
    let named = format!("--config-file {} work work", other.path().display());
    assert_eq!(
        completed(file, &[], &named),
        Ok(format!("--config-file {} work --streams=5 work", other.path().display()))
    );
}

#[test]
fn lists_come_from_one_place_and_switches_can_be_off() {
    let file = "[work]\nfrom = ['a', 'b']\ngroup = true\n";
    assert_eq!(completed(file, &[], "work"), Ok("work --from=a --from=b --group".into()));
    assert_eq!(completed(file, &[], "work --from c"), Ok("work --group --from c".into()));
    let off = [("WINDLASS_WORK_GROUP", "false"), ("WINDLASS_WORK_FROM", "x  y")];
    assert_eq!(completed(file, &off, "work"), Ok("work --from=x --from=y".into()));
    assert_eq!(completed("[work]\nfrom = 'a'", &[], "work"), Ok("work --from=a".into()));
}

#[test]
fn a_value_takes_out_what_it_excludes_in_the_places_below() {
    let file = "[work]\nbytes = 5\noutput = 'o'\n";
    assert_eq!(completed(file, &[], "work --elements 3"), Ok("work --output=o --elements 3".into()));
    assert_eq!(completed(file, &[], "work --in-place"), Ok("work --bytes=5 --in-place".into()));
    let variables = [("WINDLASS_WORK_ELEMENTS", "3")];
    assert_eq!(completed(file, &variables, "work"), Ok("work --elements=3 --output=o".into()));
    // In one place they clash, and the parser says so.
    let both = "[work]\nbytes = 5\nelements = 3\nregion = 'r'\noutput = 'o'";
    let words: Vec<OsString> = completed(both, &[], "work").unwrap().split(' ').map(OsString::from).collect();
    assert!(root().no_binary_name(true).try_get_matches_from(words).is_err());
}

#[test]
fn the_variable_that_commands_share_counts_least_of_all_that_is_said() {
    let shared = ("WINDLASS_CONTROLLER", "http://all");
    let own = ("WINDLASS_WORK_CONTROLLER", "http://own");
    assert_eq!(completed("", &[shared], "work"), Ok("work --controller=http://all".into()));
    assert_eq!(completed("", &[shared, own], "work"), Ok("work --controller=http://own".into()));
    assert_eq!(completed("", &[shared], "work --controller=x"), Ok("work --controller=x".into()));
    let file = "[work]\ncontroller = 'http://file'\n";
    assert_eq!(completed(file, &[shared], "work"), Ok("work --controller=http://file".into()));
    // Who names another source of versions does not want it, wherever that is named.
    assert_eq!(completed("", &[shared], "work --from=a"), Ok("work --from=a".into()));
    assert_eq!(completed("[work]\nfrom = ['a']\n", &[shared], "work"), Ok("work --from=a".into()));
    assert_eq!(completed("", &[shared], "bench codec"), Ok("bench codec".into()), "it has no such flag");
}

#[test]
fn what_is_required_may_stand_in_the_file() {
    let file = "[work]\nregion = 'r'\noutput = 'o'\nlease = 3\nfrom = 'a'\n";
    let words = completed(file, &[], "work").unwrap();
    root().no_binary_name(true).try_get_matches_from(words.split(' ')).unwrap();
}

#[test]
fn a_name_that_is_not_known_is_refused_with_the_nearest_one() {
    for (file, said) in [
        ("[wrok]\n", "windlass.toml:1: no command \"wrok\" for the table [wrok]; did you mean \"work\"?"),
        (
            "\n\n[bench.codes]\n",
            "windlass.toml:3: no command \"bench.codes\" for the table [bench.codes]; did you mean \"bench.codec\"?",
        ),
        ("[work]\nsteams = 3", "windlass.toml:2: [work] has no key \"steams\"; did you mean \"streams\"?"),
        (
            "[work]\nin_place = true",
            "windlass.toml:2: [work] has no key \"in_place\"; did you mean \"in-place\"?",
        ),
        (
            "[bench.codec]\ngroup = true",
            "windlass.toml:2: [bench.codec] has no key \"group\"; it is a key of [work]",
        ),
        (
            "streams = 3",
            "windlass.toml:1: \"streams\" stands outside of a command's table; it is a key of [work]",
        ),
        ("bench = 3", "windlass.toml:1: \"bench\" stands outside of a command's table"),
        ("[work]\nsecret = 1", "windlass.toml:2: [work] has no key \"secret\""),
        ("[work]\njson = true", "windlass.toml:2: [work] has no key \"json\""),
        ("[work]\npath = 'x'", "windlass.toml:2: [work] has no key \"path\""),
        ("[hidden]\nstreams = 1", "windlass.toml:1: no command \"hidden\" for the table [hidden]"),
        ("[config]\n", "windlass.toml:1: no command \"config\" for the table [config]"),
    ] {
        assert_eq!(refused(file, &[]), said, "{file}");
    }
}

#[test]
fn a_value_that_the_flag_does_not_take_is_refused_with_its_place() {
    for (file, said) in [
        ("[work]\nstreams = 65", "invalid value '65' for '--streams <streams>': 65 is not in 1..=64"),
        ("[work]\nstreams = 'many'", "invalid value 'many'"),
        ("[work]\nstreams = true", "work.streams must be a text or a number, not true or false"),
        ("[work]\nstreams = [1]", "work.streams must be a text or a number, not a list"),
        ("[work]\ngroup = 'yes'", "work.group must be true or false, not a text"),
        ("[work]\nfrom = [['a']]", "work.from must be a list of texts and numbers, not a list"),
        ("[work]\nfrom = { a = 1 }", "work.from must be a text, a number or a list of them, not a table"),
        ("[work]\nregion = 2026-01-01", "work.region must be a text or a number, not a date"),
        ("[work]\nstreams = ", "windlass.toml:2: "),
        ("[work\nstreams = 1", "windlass.toml:1: "),
        ("[work]\nstreams = 1\nstreams = 2", "windlass.toml:3: "),
        // Also where another command is run.
        (
            "[bench.codec]\nelements = false",
            "bench.codec.elements must be a text or a number, not true or false",
        ),
    ] {
        let error = refused(file, &[]);
        assert!(error.starts_with("windlass.toml:") && error.contains(said), "{file}: {error}");
    }
    let error = refused("", &[("WINDLASS_WORK_STREAMS", "0")]);
    assert!(error.starts_with("WINDLASS_WORK_STREAMS: invalid value '0'"), "{error}");
    let error = refused("", &[("WINDLASS_WORK_GROUP", "maybe")]);
    assert_eq!(error, "WINDLASS_WORK_GROUP: group must be true or false, not another word");
}

#[test]
fn numbers_of_all_kinds_reach_the_parser_in_its_own_form() {
    for (file, said) in [
        ("[work]\nbytes = 1_000", "work --bytes=1000"),
        ("[work]\nbytes = 0x10", "work --bytes=16"),
        ("[work]\nbytes = 1.50", "work --bytes=1.5"),
        ("[work]\nbytes = -3", "work --bytes=-3"),
    ] {
        assert_eq!(completed(file, &[], "work"), Ok(said.into()));
    }
}

#[test]
fn a_file_that_was_named_must_be_there() {
    let error = completed("", &[(VARIABLE, "absent.toml")], "work").unwrap_err();
    assert_eq!(error.kind, Kind::NotFound);
    assert!(error.to_string().ends_with("absent.toml") && error.advice.contains(VARIABLE), "{error}");
    assert_eq!(completed("", &[(VARIABLE, "")], "work"), Ok("work".into()));
    let long = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(long.path(), vec![b'#'; MOST as usize + 1]).unwrap();
    let error = completed("", &[(VARIABLE, long.path().to_str().unwrap())], "work").unwrap_err();
    assert!(error.kind == Kind::Invalid && error.to_string().contains("more than 1048576 bytes"), "{error}");
}

#[test]
fn none_turns_both_places_off_and_hidden_commands_look_at_neither() {
    let file = "[work]\nstreams = 2\n";
    let variables = [
        (VARIABLE, crate::service::program::NO_CONFIG),
        ("WINDLASS_WORK_GROUP", "1"),
        ("WINDLASS_HIDDEN_STREAMS", "1"),
    ];
    assert_eq!(completed(file, &variables, "work"), Ok("work".into()));
    assert_eq!(completed("[nonsense]", &variables[2..], "hidden"), Ok("hidden".into()));
}

#[test]
fn variables_that_no_flag_has_change_nothing() {
    let variables = [("WINDLASS_WORK_PORT", "tcp://10.0.0.1:80"), ("WINDLASS_WORK_SECRET", "x")];
    assert_eq!(completed("", &variables, "work"), Ok("work".into()));
    let command = root();
    let work = command.find_subcommand("work").unwrap();
    let odd =
        show::strange(&["work".to_owned()], work, &around(Path::new(""), &[("WINDLASS_WORK_STREEMS", "1")]));
    assert_eq!(odd[0].0, "WINDLASS_WORK_STREEMS");
    assert_eq!(odd[0].1, "; did you mean \"WINDLASS_WORK_STREAMS\"?");
}

impl PartialEq for ConfigError {
    fn eq(&self, other: &ConfigError) -> bool {
        self.to_string() == other.to_string()
    }
}

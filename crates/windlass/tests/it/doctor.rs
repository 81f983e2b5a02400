//! What `windlass doctor` tells people and scripts, on whatever machine this is.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

fn checks(object: &Value) -> &Vec<Value> {
    object["checks"].as_array().unwrap_or_else(|| panic!("{object}"))
}

fn check<'a>(object: &'a Value, name: &str) -> &'a Value {
    checks(object).iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no {name} in {object}"))
}

#[test]
fn the_doctor_looks_at_everything_and_advises_on_what_is_not_well() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run!("doctor", "--json", "--region-dir", dir.path());
    let object = ran.json();
    let names: BTreeSet<&str> = checks(&object).iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), checks(&object).len(), "names are unique");
    // As many as there are, and none without a driver.
    let names: BTreeSet<&str> = names.into_iter().filter(|n| !n.starts_with("gpu ")).collect();
    let expected = [
        "cpu",
        "memory",
        "cgroup memory",
        "memlock",
        "transparent huge pages",
        "huge pages of tmpfs",
        "reserved huge pages",
        "swap",
        "overcommit",
        "region directory",
        "region space",
        "open files",
        "net.core.wmem_max",
        "net.core.rmem_max",
        "net.ipv4.tcp_wmem",
        "net.ipv4.tcp_rmem",
        "tcp congestion control",
        "container",
        "cuda driver",
        "NIXL library",
        "RDMA devices",
        "GPUDirect RDMA",
        "clock",
        "memory copy",
        "memory read, 2 streams",
        "loopback",
    ];
    assert_eq!(names, BTreeSet::from(expected));
    for c in checks(&object) {
        assert!(!c["value"].as_str().unwrap().is_empty(), "{c}");
        let advice = c["advice"].as_str();
        match c["verdict"].as_str().unwrap() {
            "ok" => assert_eq!(advice, None, "{c}"),
            "advice" | "problem" => {
                assert!(advice.is_some_and(|a| !a.is_empty() && !a.contains('\n')), "{c}");
            }
            other => panic!("verdict {other}"),
        }
    }
    let problems = checks(&object).iter().any(|c| c["verdict"] == "problem");
    assert_eq!((object["ok"].as_bool(), ran.code == 0), (Some(!problems), !problems), "{object}");
    assert_eq!(object["exit"], ran.code);
    for figure in ["copy_gbps", "read2_gbps", "loopback_gbps"] {
        assert!(object[figure].as_f64().unwrap() > 0.0, "{figure} in {object}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left in the region directory");
}

#[test]
fn the_doctor_says_which_way_would_be_taken_and_why() {
    let dir = tempfile::tempdir().unwrap();
    let given = ["--region-dir", dir.path().to_str().unwrap(), "--model-bytes", "16G"];
    let object = run!("doctor", "--json", given[0], given[1], given[2], given[3]).json();
    let choices = object["choices"].as_array().unwrap();
    let near = choices.iter().find(|c| c["engines"] == "on this host, coming and going").unwrap();
    assert_eq!(near["choice"]["strategy"], "tcp", "{near}");
    assert_eq!(near["choice"]["link"], "shm", "{near}");
    let human = run!("doctor", given[0], given[1], given[2], given[3]).stdout;
    for c in choices {
        let (engines, choice) = (c["engines"].as_str().unwrap(), &c["choice"]);
        let line = format!(
            "  {engines}: {} over {}",
            choice["strategy"].as_str().unwrap(),
            choice["link"].as_str().unwrap()
        );
        assert!(human.contains(&line), "{line} in {human}");
        assert!(human.contains(choice["why"].as_str().unwrap()), "{choice} in {human}");
    }
    let wrong = run!("doctor", "--model-bytes", "much");
    assert_eq!(wrong.code, 2);
    assert!(wrong.stderr.contains("much"), "{}", wrong.stderr);
}

#[test]
fn the_doctor_writes_a_table_and_its_advice_for_people() {
    let dir = tempfile::tempdir().unwrap();
    let object = run!("doctor", "--region-dir", dir.path(), "--json").json();
    let human = run!("doctor", "--region-dir", dir.path()).stdout;
    assert!(human.starts_with("  check "), "{human}");
    for c in checks(&object) {
        let name = c["name"].as_str().unwrap();
        assert!(human.lines().any(|l| l.starts_with(&format!("  {name}  "))), "{name} in {human}");
    }
    let space = check(&object, "region directory");
    if let Some(advice) = space["advice"].as_str() {
        assert!(
            human.contains(&format!("region directory ({}): {advice}", space["verdict"].as_str().unwrap()))
        );
    }
    let count = checks(&object).len();
    assert!(human.lines().last().unwrap().starts_with(&format!("{count} checks: ")), "{human}");
}

#[test]
fn the_doctor_fails_where_regions_cannot_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let absent = run!("doctor", "--json", "--region-dir", &dir.path().join("absent"));
    assert_eq!((absent.code, absent.stderr.as_str()), (3, ""));
    assert_eq!(check(&absent.json(), "region directory")["verdict"], "problem");
    assert_eq!(absent.json()["ok"], false);
    let file = dir.path().join("file");
    fs::write(&file, "kept").unwrap();
    assert_eq!(run!("doctor", "--region-dir", &file).code, 2);
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    // No user may make a file there, not even root.
    let denied = run!("doctor", "--json", "--region-dir", "/proc/self/fdinfo");
    assert_ne!(denied.code, 0);
    assert!(check(&denied.json(), "region directory")["value"].as_str().unwrap().ends_with("not writable"));
}

#[test]
fn the_doctor_names_a_limit_that_stops_every_transfer() {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new("sh")
        .args(["-c", "ulimit -n 40 && exec \"$0\" doctor --json --region-dir \"$1\""])
        .arg(env!("CARGO_BIN_EXE_windlass"))
        .arg(dir.path())
        .output()
        .unwrap();
    let object: Value = serde_json::from_slice(&out.stdout).unwrap();
    let files = check(&object, "open files");
    assert_eq!((files["value"].as_str(), files["verdict"].as_str()), (Some("40"), Some("problem")));
    assert_eq!(out.status.code(), Some(8), "{object}");
}

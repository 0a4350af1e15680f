//! The workflows of each change and of each week: their jobs together run all steps of `.ci/run` and `.ci/weekly`.

use crate::read;

#[test]
fn every_step_has_a_job() {
    for (script, workflow) in [("run", "ci"), ("weekly", "weekly")] {
        let workflow = read(&format!(".github/workflows/{workflow}.yml"));
        let forgotten = forgotten(&read(&format!(".ci/{script}")), &workflow);
        assert!(forgotten.is_empty(), "no job runs {forgotten:?}");
    }
}

/// The steps of a script that the matrix of a workflow does not name.
fn forgotten(script: &str, workflow: &str) -> Vec<String> {
    let (_, matrix) = workflow.split_once("matrix:\n").unwrap();
    let (matrix, _) = matrix.split_once("runs-on:").unwrap();
    let named: Vec<&str> = matrix.split_whitespace().collect();
    let steps = script.lines().filter_map(|line| {
        let (command, arguments) = line.trim_start().split_once(' ')?;
        let is_step = command == "step" || command == "step_beside";
        is_step.then(|| arguments.split(' ').next())?
    });
    let steps: Vec<&str> = steps.collect();
    assert!(steps.len() > 2, "{steps:?}");
    let forgotten = steps.into_iter().filter(|step| !named.contains(step));
    forgotten.map(str::to_owned).collect()
}

#[test]
fn a_planted_step_without_a_job_is_found() {
    let script = "    step fmt cargo fmt\n    step_beside lost true\n    step gone true\n    step beta true\n";
    let workflow = "matrix:\n- fmt docs\n- { steps: beta }\nruns-on: gone\n";
    assert_eq!(forgotten(script, workflow), ["lost", "gone"]);
}

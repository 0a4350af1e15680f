//! The tables of settings, compared with the setters, and those of variables with what is read.

/// The heading of a table, and the files with the setters that it lists.
const TABLES: [(&str, &[&str]); 3] = [
    (
        "Redlock::builder()",
        &[
            "src/lock/builder.rs",
            "src/lock/node_group.rs",
            "src/lock/settings.rs",
        ],
    ),
    (
        "RedlockLayer",
        &["src/middleware/layer.rs", "src/macros.rs"],
    ),
    (
        "IdempotencyLayer",
        &["src/idempotency/layer.rs", "src/macros.rs"],
    ),
];

/// Not settings: the end of the builder, the name of a group, and nodes for tests.
const NO_SETTINGS: [&str; 5] = ["build", "name", "scripted", "simulated", "traces"];

/// Settings of the builder that no environment variable can have; `urls` has one, which may have groups too.
const NO_VARIABLES: [&str; 10] = [
    "url",
    "pool_config",
    "pool",
    "embedded",
    "group",
    "named_group",
    "node_group",
    "credentials",
    "retry",
    "runtime",
];

/// The setters that the chapter lacks, and the names in it that are no setters.
pub(crate) fn differences(chapter: &str, read: &impl Fn(&str) -> String) -> Vec<String> {
    let mut found = Vec::new();
    let all_setters =
        |files: &[&str]| Vec::from_iter(files.iter().flat_map(|file| setters(&read(file))));
    for (heading, files) in TABLES {
        let (listed, setters) = (listed(chapter, heading), all_setters(files));
        let file = files[0];
        assert!(setters.len() > 5, "{file}: {setters:?}");
        let missing = setters.iter().filter(|name| !listed.contains(name));
        found.extend(missing.map(|name| format!("{heading} lacks `{name}`")));
        let unknown = listed.iter().filter(|name| !setters.contains(name));
        found.extend(unknown.map(|name| format!("{heading} lists `{name}`, which {file} lacks")));
    }
    found.extend(differences_of_variables(
        &listed(chapter, "RedlockConfig"),
        &variables(&read("src/lock/config.rs"), &read("src/lock/settings.rs")),
        &all_setters(TABLES[0].1),
    ));
    found
}

/// The variables that the chapter lacks, those that are not read, and the settings of the builder without one.
fn differences_of_variables(
    listed: &[String],
    variables: &[String],
    setters: &[String],
) -> Vec<String> {
    let missing = variables.iter().filter(|name| !listed.contains(name));
    let missing = missing.map(|name| format!("RedlockConfig lacks `{name}`"));
    let unknown = listed.iter().filter(|name| !variables.contains(name));
    let unknown = unknown.map(|name| format!("RedlockConfig lists `{name}`, which is not read"));
    let unread = setters.iter().filter(|name| {
        let variable = format!("REDLOCK_{}", name.to_uppercase());
        !NO_VARIABLES.contains(&name.as_str()) && !variables.contains(&variable)
    });
    let unread = unread.map(|name| format!("RedlockConfig has no variable of `{name}`"));
    missing.chain(unknown).chain(unread).collect()
}

/// The environment variables that a source reads: those in its list of names, and those of the table of settings.
fn variables(source: &str, table: &str) -> Vec<String> {
    let list = source.split("const NAMES: &[&str] = &[").nth(1);
    let list = list.and_then(|list| list.split(']').next());
    let names = list.unwrap_or_default().split('"').skip(1).step_by(2);
    let names = names.map(str::to_owned).chain(setters(table));
    let variable = |name: String| format!("REDLOCK_{}", name.to_uppercase());
    names.map(variable).collect()
}

/// The names in the first column of the table below a heading.
fn listed(chapter: &str, heading: &str) -> Vec<String> {
    let Some((_, section)) = chapter.split_once(&format!("# {heading}\n")) else {
        return Vec::new();
    };
    let section = section.split("\n# ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let columns = rows.filter_map(|row| row.split('|').nth(1));
    columns
        .flat_map(|column| column.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// The public methods that take `self` by value and something to set, also those that a macro writes.
fn setters(source: &str) -> Vec<String> {
    let source = source.split("\nmod tests").next().unwrap_or_default();
    let mut names = Vec::new();
    let functions = source.split("    pub fn ").skip(1);
    for function in functions {
        let signature: String = function
            .split('{')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let name = function.split(['(', '<']).next().unwrap_or_default();
        let takes_self = ["(mutself,", "(self,"]
            .iter()
            .any(|part| signature.contains(part));
        // A macro has a variable in the place of the name.
        if takes_self && !NO_SETTINGS.contains(&name) && !name.starts_with('$') {
            names.push(name.to_owned());
        }
    }
    let by_macro = source.split("    layer_setters! {\n");
    let by_macro = by_macro
        .flat_map(|block| block.split("    $macro! {\n"))
        .skip(1);
    let by_macro = by_macro.flat_map(|block| block.lines().take_while(|line| line.trim() != "}"));
    for line in by_macro {
        let line = line.trim();
        if let Some(setter) = line.strip_suffix(';').or_else(|| line.strip_suffix("=>"))
            && let Some(name) = setter.split(['(', ':']).next()
            && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
        {
            names.push(name.to_owned());
        }
    }
    names
}

#[test]
fn planted_differences_are_found() {
    let chapter =
        "# Redlock::builder()\n\n| `a`, `gone` | x |\n\n# RedlockLayer\n\n# IdempotencyLayer\n";
    let names = ["a", "b", "c", "d", "e"];
    let methods =
        names.map(|name| format!("    pub fn {name}(mut self, x: u8) -> Self {{\n    }}\n"));
    let source = methods.concat() + "    layer_setters! {\n        /// Docs.\n        f;\n    }\n";
    let found = differences(chapter, &|file| match file {
        "src/lock/settings.rs" | "src/lock/node_group.rs" | "src/macros.rs" => String::new(),
        _ => source.clone(),
    });
    assert_eq!(
        found[..2],
        [
            "Redlock::builder() lacks `b`",
            "Redlock::builder() lacks `c`"
        ]
    );
    assert_eq!(found[4], "Redlock::builder() lacks `f`");
    assert_eq!(
        found[5],
        "Redlock::builder() lists `gone`, which src/lock/builder.rs lacks"
    );
    assert_eq!(found.len(), 24);
}

#[test]
fn planted_differences_of_variables_are_found() {
    let names = |names: &[&str]| Vec::from_iter(names.iter().map(|name| String::from(*name)));
    let source = "const NAMES: &[&str] = &[\"a\", $(stringify!($name)),+];\nlet x = \"c\";";
    let table = "        $macro! {\n            /// Docs.\n            b: u8 = 1;\n        }\n";
    let variables = variables(source, table);
    assert_eq!(variables, ["REDLOCK_A", "REDLOCK_B"]);
    let found = differences_of_variables(
        &names(&["REDLOCK_A", "REDLOCK_GONE"]),
        &variables,
        &names(&["a", "b", "c", "retry"]),
    );
    assert_eq!(
        found,
        [
            "RedlockConfig lacks `REDLOCK_B`",
            "RedlockConfig lists `REDLOCK_GONE`, which is not read",
            "RedlockConfig has no variable of `c`"
        ]
    );
}

// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {AgentRole} from "./AgentRole.sol";
import {CfaToken} from "./CfaToken.sol";

/// Pays holders from a redemption account and burns their units.
///
/// Long lists are split into parts. Parts are accepted in order and once, and each is atomic.
/// Payment and burn are forced: a frozen holder's claim ends with the issue, and the money stays
/// frozen at the same address.
contract Redemption is AgentRole {
    CfaToken public immutable money;

    mapping(bytes32 redemptionId => uint256) public partsDone;

    event Redeemed(
        bytes32 indexed redemptionId, address indexed token, address indexed holder, uint256 units, uint256 payment
    );
    event PartDistributed(bytes32 indexed redemptionId, uint256 part, uint256 units, uint256 paid);

    error WrongPart(uint256 expected, uint256 given);
    error Underfunded(uint256 balance, uint256 needed);
    error MalformedPart();

    constructor(CfaToken money_) {
        money = money_;
    }

    /// `account` is the issue's redemption account, or the issuer's for a single buyback.
    function distribute(
        bytes32 redemptionId,
        uint256 part,
        CfaToken token,
        address account,
        address[] calldata holders,
        uint256[] calldata units,
        uint256[] calldata payments
    ) external onlyAgent {
        if (part != partsDone[redemptionId]) revert WrongPart(partsDone[redemptionId], part);
        if (holders.length != units.length || holders.length != payments.length) revert MalformedPart();
        partsDone[redemptionId] = part + 1;
        uint256 needed = 0;
        uint256 burned = 0;
        for (uint256 i = 0; i < payments.length; ++i) needed += payments[i];
        uint256 balance = money.balanceOf(account);
        if (balance < needed) revert Underfunded(balance, needed);
        for (uint256 i = 0; i < holders.length; ++i) {
            if (payments[i] != 0) money.forcedTransfer(account, holders[i], payments[i]);
            token.burn(holders[i], units[i]);
            burned += units[i];
            emit Redeemed(redemptionId, address(token), holders[i], units[i], payments[i]);
        }
        emit PartDistributed(redemptionId, part, burned, needed);
    }
}
